"""The help text of a configuration class, with one line for each key."""

import shutil
import textwrap
from collections.abc import Collection, Sequence

import draccus
import yaml

from gregale.errors import UserError
from gregale.settings.config_schema import REQUIRED, Entry, entries

WIDTH = 100  # maximum, and the width without a terminal
MIN_WIDTH = 80
MAX_COLUMN = 26
MIN_MEANING = 20
NO_BREAK = "\N{NO-BREAK SPACE}"


def render(config_class: type, topic: str | None = None, only: Collection[str] = ()) -> str:
    """Return the keys with type, default and meaning, under headings with the first part of the dotted key.

    Keys that only some choices of a `type` have are listed under these choices. With `topic`, a dotted key, the text
    has all choices below that key; without it, only the default choices. `only` limits the text to these keys and the
    keys below them. Raises `UserError` if no key is below the topic.
    """
    listed = [entry for entry in entries(config_class) if not only or _is_below(entry.key, only)]
    defaults = {entry.key: entry.default for entry in listed}
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in _of_default_choices(listed) if topic is None else _below(listed, topic):
        key = entry.choice.partition(" ")[0]
        choice = f"{key} {defaults[key]}" if key and topic is None else entry.choice
        groups.setdefault((entry.key.rpartition(".")[0], choice), []).append(entry)
    lines = []
    for (prefix, choice), group in groups.items():
        if prefix:
            lines.append(f"  --{prefix}.*" + (f" with {choice.removeprefix(f'{prefix}.')}" if choice else ""))
        lines += _lines(group, prefix)
    return "\n".join(lines) + "\n"


def topics(config_class: type, only: Collection[str] = ()) -> list[str]:
    """Return the keys below which a choice has keys that the default choice lacks."""
    listed = [entry for entry in entries(config_class) if not only or _is_below(entry.key, only)]
    shown = _of_default_choices(listed)
    hidden = {entry.choice.partition(" ")[0].removesuffix(".type") for entry in listed if entry not in shown}
    hidden = {key.partition(".<")[0].removesuffix(".0") for key in hidden}  # elements of a mapping or a list
    return sorted(key for key in hidden if not any(key.startswith(f"{other}.") for other in hidden))


def _of_default_choices(listed: Sequence[Entry]) -> list[Entry]:
    """Return the keys of a configuration in which every `type` has its default."""
    shown: list[Entry] = []
    chosen: dict[str, object] = {}  # the defaults of shown keys; a key that depends on a hidden key is hidden too
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
    """Format a group in three columns of minimum width; a long cell moves only its own line to the right."""
    indent = " " * 6 if prefix else "  --"
    rows = [(entry.key.rpartition(".")[2], _type_and_default(entry), entry.meaning) for entry in group]
    width = max(MIN_WIDTH, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))
    columns = [min(MAX_COLUMN, max(len(row[column]) for row in rows)) for column in (0, 1)]
    lines = []
    for name, value, meaning in rows:
        head = f"{indent}{name:<{columns[0]}}  {value:<{columns[1]}}  "
        hanging = " " * (len(indent) + sum(columns) + 4)
        if len(head) > width - MIN_MEANING:
            start = f"{indent}{name:<{columns[0]}}  "
            wrapper = textwrap.TextWrapper(
                width, start, " " * len(start), break_on_hyphens=False, break_long_words=False
            )
            lines += wrapper.wrap(value)
            head = hanging
        lines += _wrapped(meaning, width, head, hanging) or [head.rstrip()]
    return lines


def _wrapped(meaning: str, width: int, head: str, hanging: str) -> list[str]:
    """Wrap a meaning into lines; the range at its end is not split."""
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
    # PyYAML adds a document end marker after a single scalar.
    return f"{entry.type} = {text.splitlines()[0]}"
