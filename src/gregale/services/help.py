"""The help text of a configuration class, from its fields: one line a key."""

from __future__ import annotations

import textwrap
from itertools import groupby

import draccus
import yaml

from gregale.services.fields import REQUIRED, Entry, entries

WIDTH = 100
LONGEST_COLUMN = 30


def render(config_class: type) -> str:
    """Every key with its type, default and meaning; what a choice of a `type` adds is listed under that choice."""
    lines = []
    for (_, choice), group in groupby(entries(config_class), key=_group):
        if choice:
            lines.append(f"  with --{choice}:")
        lines += _lines(list(group), indent=4 if choice else 2)
    return "\n".join(lines) + "\n"


def _group(entry: Entry) -> tuple[str, str]:
    return entry.key.rpartition(".")[0], entry.choice


def _lines(group: list[Entry], indent: int) -> list[str]:
    """A group in three columns, as narrow as the group allows; a long cell pushes only its own line to the right."""
    rows = [(f"--{entry.key}", _type_and_default(entry), entry.help) for entry in group]
    columns = [min(LONGEST_COLUMN, max(len(row[column]) for row in rows)) for column in (0, 1)]
    lines = []
    for key, value, meaning in rows:
        head = f"{' ' * indent}{key:<{columns[0]}}  {value:<{columns[1]}}  "
        hanging = " " * (indent + sum(columns) + 4)
        lines += textwrap.wrap(meaning, WIDTH, initial_indent=head, subsequent_indent=hanging) or [head.rstrip()]
    return lines


def _type_and_default(entry: Entry) -> str:
    if entry.default is REQUIRED:
        return f"{entry.type} (required)"
    if isinstance(entry.default, float):
        return f"{entry.type} = {entry.default:g}"
    text = yaml.safe_dump(draccus.encode(entry.default), default_flow_style=True, width=WIDTH)
    # PyYAML ends a lone scalar with the document's end.
    return f"{entry.type} = {text.splitlines()[0]}"
