"""The configuration keys of other projects beside those of a run.

`other_projects.txt` has the table. `docs/migration.md` shows it, and messages about unknown keys look keys up in it.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

MOST_SHOWN = 8


class Counterpart(NamedTuple):
    """A row of the table; `ours` is "" if there is no counterpart."""

    project: str
    theirs: str
    ours: str
    note: str

    @property
    def sentence(self) -> str:
        """Return the row as a part of a message."""
        found = f"`{self.theirs}` of {self.project} "
        found += f"is `{self.ours}` here" if self.ours else "has no counterpart here"
        return f"{found} ({self.note})" if self.note else found


def _lines() -> list[str]:
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@cache
def projects() -> dict[str, str]:
    """Return each project's name and the files that its keys are from."""
    heads = [line[1:].partition("] ") for line in _lines() if line.startswith("[")]
    return {name: files for name, _, files in heads}


@cache
def counterparts() -> tuple[Counterpart, ...]:
    """Return the rows of all projects in the order of the table."""
    found, project = [], ""
    for line in _lines():
        if line.startswith("["):
            project = line[1:].partition("]")[0]
        else:
            theirs, ours, note = ([part.strip() for part in line.split("|", 2)] + [""])[:3]
            found.append(Counterpart(project, theirs, ours, note))
    return tuple(found)


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
    written = {_written(each) for each in _keys_in(key, value)}
    found = {(_written(row.theirs), row.ours): row for row in reversed(counterparts())}
    return [row for row in counterparts() if _written(row.theirs) in written and row in found.values()]


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


def _written(key: str) -> str:
    return key.lower().replace("-", "_")
