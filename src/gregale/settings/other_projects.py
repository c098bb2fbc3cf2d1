"""The configuration keys of other projects beside those of a run.

`other_projects.toml` has a row for each key; `docs/migration.md` shows them, and messages about unknown keys look keys
up in them. `<name>` in a key stands for any name.
"""

import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

MOST_SHOWN = 8


class Counterpart(NamedTuple):
    """A row of the table; `ours` is "" if there is no counterpart."""

    project: str
    theirs: str
    ours: str = ""
    note: str = ""

    @property
    def sentence(self) -> str:
        """Return the row as a part of a message."""
        found = f"`{self.theirs}` of {self.project} "
        found += f"is `{self.ours}` here" if self.ours else "has no counterpart here"
        return f"{found} ({self.note})" if self.note else found


@cache
def projects() -> dict[str, dict[str, Any]]:
    """Return each project's name with `files` (its keys' origin), `as_of` (their state) and `keys` (the rows)."""
    return tomllib.loads((files("gregale.settings") / "other_projects.toml").read_text(encoding="utf-8"))


@cache
def counterparts() -> tuple[Counterpart, ...]:
    """Return the rows of all projects in the order of the table."""
    return tuple(Counterpart(project, *row) for project, table in projects().items() for row in table["keys"])


@cache
def names_of(key: str) -> tuple[str, ...]:
    """Return the names that other projects have for a key of ours, without the sections above them.

    Only names with an underscore, because shorter ones (`interval`, `mode`) say little without their section. The outer
    optimizer has the names of the optimizer.
    """
    ours: dict[str, set[str]] = {}
    for row in counterparts():
        ours.setdefault(_written(row.theirs).rpartition(".")[2], set()).add(row.ours)
    key = key.replace("sync.outer.", "optimizer.", 1)
    return tuple(name for name, keys in ours.items() if keys == {key} and "_" in name and key.split(".")[-1] != name)


def rows_at(key: str, value: Any) -> list[Counterpart]:
    """Return the rows of a key of another project; for a section (a mapping), those of the keys in it.

    Of equal rows of several projects it returns the first.
    """
    written = [_written(each) for each in _keys_in(key, value)]
    found = {(_written(row.theirs), row.ours): row for row in reversed(counterparts())}
    return [row for row in counterparts() if row in found.values() and any(_stands_for(row, each) for each in written)]


def sentences(rows: list[Counterpart]) -> str:
    """Return rows as one sentence for a message; "" for none."""
    shown = "; ".join(row.sentence for row in rows[:MOST_SHOWN])
    more = f"; docs/migration.md has {len(rows) - MOST_SHOWN} more of these keys" if len(rows) > MOST_SHOWN else ""
    return f" {shown}{more}." if rows else ""


def _keys_in(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _keys_in(f"{key}.{name}", inner)
    else:
        yield key


def _stands_for(row: Counterpart, written: str) -> bool:
    """Return whether a row's key is the written one, or a section that has it.

    A key without a counterpart is found in any section, also with a prefix: `model.experts.moe_capacity_factor`.
    """
    pattern = _written(row.theirs).replace("<name>", "*")
    if not row.ours and "_" in pattern and written.endswith(pattern):
        return True
    return fnmatchcase(written, pattern) or fnmatchcase(written, f"{pattern}.*")


def _written(key: str) -> str:
    return key.lower().replace("-", "_")
