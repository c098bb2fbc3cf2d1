"""The help text of a configuration class, from its fields: one line a key."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Sequence

import draccus
import yaml

from gregale.errors import UserError
from gregale.settings.config_schema import REQUIRED, Entry, entries

WIDTH = 100  # at most, and where no terminal says how wide it is
NARROWEST = 80
LONGEST_COLUMN = 26
SHORTEST_MEANING = 20
NO_BREAK = "\N{NO-BREAK SPACE}"


def render(config_class: type, topic: str | None = None, only: Collection[str] = ()) -> str:
    """The keys with type, default and meaning, under a heading with the first part of the dotted key.

    What only some choices of a `type` have is listed under these choices: with `topic`, a dotted key, all choices of
    what is below that key; without, all keys of the default choices. With `only`, no keys but these and those below.

    Raises `UserError` if no key is below the topic.
    """
    listed = [entry for entry in entries(config_class) if not only or _is_below(entry.key, only)]
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in _of_default_choices(listed) if topic is None else _below(listed, topic):
        groups.setdefault((entry.key.rpartition(".")[0], entry.choice), []).append(entry)
    lines = []
    for (prefix, choice), group in groups.items():
        if prefix:
            lines.append(f"  --{prefix}.*" + (f" with {choice.removeprefix(f'{prefix}.')}" if choice else ""))
        lines += _lines(group, prefix)
    return "\n".join(lines) + "\n"


def topics(config_class: type, only: Collection[str] = ()) -> list[str]:
    """The keys below which some choice has keys that the default choice has not."""
    listed = [entry for entry in entries(config_class) if not only or _is_below(entry.key, only)]
    shown = _of_default_choices(listed)
    hidden = {entry.choice.partition(" ")[0].removesuffix(".type") for entry in listed if entry not in shown}
    hidden = {key.partition(".<")[0].removesuffix(".0") for key in hidden}  # elements of a mapping or a list
    return sorted(key for key in hidden if not any(key.startswith(f"{other}.") for other in hidden))


def _of_default_choices(listed: Sequence[Entry]) -> list[Entry]:
    """The keys that a configuration has in which every `type` is left at its default."""
    shown: list[Entry] = []
    chosen: dict[str, object] = {}  # of the keys that are there: a key is not, whose choice depends on one that is not
    for entry in listed:
        key, _, names = entry.choice.partition(" ")
        if not key or chosen.get(key) in names.split(", "):
            shown.append(entry)
            chosen.setdefault(entry.key, entry.default)
    return shown


def _is_below(key: str, others: Collection[str]) -> bool:
    return any(f"{key}.".startswith(f"{other}.") for other in others)


def _below(listed: Sequence[Entry], topic: str) -> list[Entry]:
    found = [entry for entry in listed if _is_below(entry.key, [topic])]
    if not found:
        known = sorted({entry.key.partition(".")[0] for entry in listed})
        raise UserError(f"--help {topic}: there is no such key. The first parts of the keys are: {', '.join(known)}.")
    return found


def _lines(group: list[Entry], prefix: str) -> list[str]:
    """A group in three columns, as narrow as the group allows; a long cell pushes only its own line to the right."""
    indent = " " * 6 if prefix else "  --"
    rows = [(entry.key.rpartition(".")[2], _type_and_default(entry), entry.meaning) for entry in group]
    width = max(NARROWEST, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))
    columns = [min(LONGEST_COLUMN, max(len(row[column]) for row in rows)) for column in (0, 1)]
    lines = []
    for name, value, meaning in rows:
        head = f"{indent}{name:<{columns[0]}}  {value:<{columns[1]}}  "
        hanging = " " * (len(indent) + sum(columns) + 4)
        if len(head) > width - SHORTEST_MEANING:
            start = f"{indent}{name:<{columns[0]}}  "
            wrapper = textwrap.TextWrapper(
                width, start, " " * len(start), break_on_hyphens=False, break_long_words=False
            )
            lines += wrapper.wrap(value)
            head = hanging
        lines += _wrapped(meaning, width, head, hanging) or [head.rstrip()]
    return lines


def _wrapped(meaning: str, width: int, head: str, hanging: str) -> list[str]:
    """A meaning in lines; the range at its end stays in one piece."""
    text, bracket, span = meaning.rpartition(" [")
    whole = f"{text}{bracket}{span.replace(' ', NO_BREAK)}" if bracket else meaning
    lines = textwrap.wrap(whole, width, initial_indent=head, subsequent_indent=hanging)
    return [line.replace(NO_BREAK, " ") for line in lines]


def _type_and_default(entry: Entry) -> str:
    if entry.default is REQUIRED:
        return f"{entry.type} (required)"
    if isinstance(entry.default, float):
        return f"{entry.type} = {entry.default:g}"
    text = yaml.safe_dump(draccus.encode(entry.default), default_flow_style=True, width=WIDTH)
    # PyYAML ends a lone scalar with the document's end.
    return f"{entry.type} = {text.splitlines()[0]}"
