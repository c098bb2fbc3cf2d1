"""The help text of a configuration class, from its fields: one line a key."""

from __future__ import annotations

import textwrap

import draccus
import yaml

from gregale.services.fields import REQUIRED, Entry, entries

WIDTH = 100
LONGEST_COLUMN = 26
SHORTEST_MEANING = 20


def render(config_class: type) -> str:
    """Every key with its type, default and meaning, under a heading with the first part of the dotted key.

    What only some choices of a `type` have is listed under these choices.
    """
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries(config_class):
        groups.setdefault((entry.key.rpartition(".")[0], entry.choice), []).append(entry)
    lines = []
    for (prefix, choice), group in groups.items():
        if prefix:
            lines.append(f"  --{prefix}.*" + (f" with {choice.removeprefix(f'{prefix}.')}" if choice else ""))
        lines += _lines(group, prefix)
    return "\n".join(lines) + "\n"


def _lines(group: list[Entry], prefix: str) -> list[str]:
    """A group in three columns, as narrow as the group allows; a long cell pushes only its own line to the right."""
    indent = " " * 6 if prefix else "  --"
    rows = [(entry.key.rpartition(".")[2], _type_and_default(entry), entry.help) for entry in group]
    columns = [min(LONGEST_COLUMN, max(len(row[column]) for row in rows)) for column in (0, 1)]
    lines = []
    for name, value, meaning in rows:
        head = f"{indent}{name:<{columns[0]}}  {value:<{columns[1]}}  "
        hanging = " " * (len(indent) + sum(columns) + 4)
        if len(head) > WIDTH - SHORTEST_MEANING:
            lines.append(head.rstrip())
            head = hanging
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
