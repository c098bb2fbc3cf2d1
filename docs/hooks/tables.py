"""Write the tables of four pages from the code: `python docs/hooks/tables.py`. A test holds them equal.

In configuration.md `<!-- keys -->` begins the keys of a run, `<!-- options -->` each command with its options, and
`<!-- fixed -->` the keys that a run cannot change. In metrics.md `<!-- metrics -->` begins all metrics, in migration.md
`<!-- migration -->` the keys of each other project, and in reference/what_does_not_go_together.md `<!-- configuration
-->`, `<!-- layout -->`, `<!-- training -->` and `<!-- forms -->` the rules of a kind. `<!-- end -->` ends each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import get_args

import draccus
import yaml

from gregale.cli import PROGRAMS
from gregale.cli.invocation import usage
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import PluginOptions
from gregale.runs.rules import RULES
from gregale.settings import CONFIGURATION, LAYOUT, TRAINING, Rule
from gregale.settings.decoding import REQUIRED, Entry, counterparts, entries, projects, types_of
from gregale.tracking.metrics import METRICS


def filled(page: str, markdown: str) -> str:
    """A page with its tables as the code has them now."""
    for name, part in PARTS[page].items():
        begin, rest = markdown.split(f"<!-- {name} -->\n")
        markdown = f"{begin}<!-- {name} -->\n\n{part().strip()}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return markdown


def metrics() -> str:
    """Every metric that a run logs."""
    rows = [(f"`{each.name}`", each.when, each.unit, each.meaning, each.where) for each in METRICS]
    lines = ["| name | lines of | unit | meaning | runs that have it |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def fixed() -> str:
    """The keys that a run cannot change when it goes on, each with its reason."""
    rows = {entry.key: entry.fixed for entry in entries(TrainConfig) if entry.fixed}
    lines = ["| key | why |", "|---|---|"]
    for key, reason in rows.items():
        only = "" if reason.at is ... else f" (only from {reason.at} or to {reason.at})"
        lines.append(f"| `{key}`{only} | {reason.why} |")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Every command: how it is called, what it does, its options."""
    sections = []
    for name, program in PROGRAMS.items():
        command = program.command
        options = tables(command.options) + (tables(PluginOptions) if command.plugins else "")
        sections.append(f"### `{usage(name, command)}`\n\n{program.summary}\n\n{options}")
    return "\n".join(sections)


def migration() -> str:
    """The keys of other projects with ours, a table for each project."""
    sections = []
    for project, table in projects().items():
        rows = [row for row in counterparts() if row.project == project]
        lines = [f"| {project} | Gregale | note |", "|---|---|---|"]
        lines += [f"| `{row.theirs}` | {f'`{row.ours}`' if row.ours else '-'} | {escaped(row.note)} |" for row in rows]
        origin = f"Keys of {table['files']}, as of {table['as_of']}."
        sections.append(f"## {project}\n\n{origin}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(sections)


def every_rule() -> list[Rule]:
    """The rules of the table, then those of Gregale's own pieces."""
    found, kinds = list(RULES), [each for kind in types_of(TrainConfig).values() for each in get_args(kind) or (kind,)]
    while kinds:
        kind = kinds.pop(0)
        if isinstance(kind, type) and kind.__module__.startswith("gregale."):
            found += vars(kind).get("incompatible", ())
            kinds += kind.__subclasses__()
    return found


def rules(rows: Iterable[Rule]) -> str:
    """Rules between settings, each with its reason and what would work."""
    lines = ["| settings | why not | what would work |", "|---|---|---|"]
    for rule in rows:
        settings = [NAME.sub(lambda name: f"<{name[1]}>", each) for each in rule.settings.split(" & ")]
        keys = [re.split(": | != ", setting)[0] for setting in settings]
        text = NAME.sub(
            lambda name, keys=keys: in_words(name[1], keys), rule.text.replace("{{", "{").replace("}}", "}")
        )
        reason, _, instead = text.partition(". ")
        lines.append(f"| {', '.join(f'`{each}`' for each in settings)} | {reason.removesuffix('.')} | {instead} |")
    return "\n".join(lines) + "\n"


def in_words(name: str, keys: list[str]) -> str:
    """A value that a message has: of a key the key, else what it is called."""
    key = keys[int(name)] if name.isdigit() else name
    return f"`{key}`" if key != name or "." in key else f"*{key}*"


def tables(config_class: type) -> str:
    """A table for each group of keys: those with the same first part, under the same choice."""
    return "\n".join(table(key, list(group)) for key, group in groupby(entries(config_class), group_of))


def group_of(entry: Entry) -> tuple[str, str]:
    return entry.key.rpartition(".")[0], entry.choice


def table(group: tuple[str, str], rows: list[Entry]) -> str:
    prefix, choice = group
    lines = [f"### `{prefix}`\n"] if prefix and not choice else [f"With `{choice}`:\n"] if choice else []
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{row.key}` | {escaped(row.type)} | {default(row)} | {escaped(row.meaning)} |" for row in rows]
    return "\n".join(lines) + "\n"


def default(entry: Entry) -> str:
    if entry.default is REQUIRED:
        return "required"
    if isinstance(entry.default, float):
        return f"`{entry.default:g}`"
    return f"`{yaml.safe_dump(draccus.encode(entry.default), default_flow_style=True, width=1000).splitlines()[0]}`"


def escaped(text: str) -> str:
    """Text for a cell: no cell ends at a `|` of a type, and `<name>` is no HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")


NAME = re.compile(r"{([\w.]+)}")
KINDS = (CONFIGURATION, LAYOUT, TRAINING)
PARTS = {
    "configuration.md": {"keys": lambda: tables(TrainConfig), "options": commands, "fixed": fixed},
    "metrics.md": {"metrics": metrics},
    "migration.md": {"migration": migration},
    "reference/what_does_not_go_together.md": {
        **{at: partial(lambda at: rules(rule for rule in every_rule() if rule.at == at), at) for at in KINDS},
    },
}

if __name__ == "__main__":
    for page in PARTS:
        path = Path(__file__).parents[1] / page
        path.write_text(filled(page, path.read_text()))
