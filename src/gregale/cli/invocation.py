"""Invocation of a command: it fills the options and the configuration from the arguments. The help of a command."""

import json
import os
import shutil
import textwrap
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from itertools import takewhile
from typing import Any, get_origin

import draccus
import yaml

from gregale.errors import UserError
from gregale.programs.command import Command
from gregale.runs import parsing
from gregale.runs.parsing import load, load_plugins, split_arguments
from gregale.runs.sections import OF_PLUGINS
from gregale.settings import did_you_mean
from gregale.settings.decoding import (
    REQUIRED,
    Entry,
    default_of,
    entries,
    is_list_at,
    section_at,
    suggestions,
    types_of,
)

CONFIG = "config"
WIDTH = 100  # maximum, and the width without a terminal
MIN_WIDTH = 80
MAX_COLUMN = 26
MIN_MEANING = 20
NO_BREAK = "\N{NO-BREAK SPACE}"


def bound(name: str, command: Command, arguments: Sequence[str]) -> Callable[[], int]:
    """Return `command` with its arguments (without its name), ready to run; it returns the exit code.

    Keys of the command's options set options, all others the configuration. Raises `UserError` for a superfluous word,
    a missing word, and the errors of `load`.
    """
    own = {each.name for each in fields(command.options)}
    words, pairs = _split(command, arguments)
    if _imported(command, words, pairs):
        words, pairs = _split(command, arguments)  # again, with the keys that the plugins add
    _check_not_empty(name, command, words)
    if _takes_many(command):
        last = len(command.positional) - 1
        words = [*words[:last], json.dumps(words[last:])] if words[last:] else words
    if len(words) > len(command.positional):
        raise UserError(f"{words[len(command.positional)]!r} is one word too many. Usage: {usage(name, command)}")
    if command.plugins:
        pairs = [pair for pair in pairs if _key(pair) != parsing.PLUGINS]
    given = dict(zip(command.positional, words, strict=False))
    _check_complete(name, command, given, pairs)
    path = given.pop(CONFIG, None) if command.config else None
    for_options = [f"--{key}={word}" for key, word in given.items()]
    for_options += [pair for pair in pairs if command.config is None or _key(pair).split(".")[0] in own]
    options = load(command.options, None, for_options)
    if command.config is None:
        return partial(command.main, options)
    config = load(command.config, path, [pair for pair in pairs if pair not in for_options])
    from gregale.huggingface.hub import resolved  # late: a command without a configuration does not import JAX

    return partial(command.main, options, resolved(config))


def _split(command: Command, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words and the keys of a command line."""
    parts = [command.options] if command.config is None else [command.options, command.config]
    flags = {entry.key for part in parts for entry in entries(part) if entry.type == "bool"}
    lists = {entry.key for entry in entries(command.options) if entry.type == "list of str"}
    lists |= {parsing.PLUGINS} if command.plugins else set()
    for at, key in enumerate(arguments if command.config else ()):
        after = takewhile(lambda word: word[:2] != "--" and not word.endswith((".yaml", ".yml")), arguments[at + 1 :])
        values = [word for word in after if not os.path.exists(word)]
        is_list = key.startswith("--") and key[2:] not in lists and is_list_at(parts[-1], key[2:].split("."))
        if is_list and len(values) > 1:
            raise UserError(f"{key}: on the command line a list is one word, with commas: `{key} {','.join(values)}`.")
    words, pairs = split_arguments(arguments, flags, lists, len(command.positional))
    fields_of = {f"--{alias}": f"--{name}" for alias, name in command.aliases.items()}
    return words, ["".join((fields_of.get(key, key), *rest)) for key, *rest in (pair.partition("=") for pair in pairs)]


def _imported(command: Command, words: Sequence[str], pairs: Sequence[str]) -> bool:
    """Import the plugins that the command line and the configuration file name; return whether there are any.

    A pipe (`gregale train <(...)`) can be read once, so `load` alone reads it.
    """
    keys = {each.name for part in (command.options, command.config) if part is not None for each in fields(part)}
    if not (command.plugins or parsing.PLUGINS in keys):
        return False
    place = command.positional.index(CONFIG) if command.config and CONFIG in command.positional else len(words)
    return bool(load_plugins(words[place : place + 1], pairs))


def command_help(
    name: str, summary: str, command: Command, topic: str | None = None, arguments: Sequence[str] = ()
) -> str:
    """Return the help text of a command: usage, options and configuration keys, or all keys below `topic`.

    - `arguments`: those before `--help`, whose plugins add choices if they can be imported
    """
    with suppress(UserError):
        _imported(command, *_split(command, arguments))
    reads = command.reads and (*command.reads, *OF_PLUGINS)
    if topic is not None and command.config:
        section: Any = next(iter(section_at(command.config, topic.split(".")) or ()), None)
        explanation = f"\n{section.explanation()}\n" if hasattr(section, "explanation") else ""
        return render(command.config, topic, reads) + explanation
    text = f"usage: {usage(name, command)}\n\n{summary}\n"
    if fields(command.options):
        text += f"\noptions:\n{render(command.options)}"
    if command.plugins:
        text += render(parsing.PluginOptions)
    if command.config:
        heading = "keys that it reads from a run's YAML file" if reads else "keys of the YAML file"
        text += f"\n{heading}, each also an argument:\n{render(command.config, only=reads)}"
        if others := topics(command.config, reads):
            text += f"\n`gregale {name} --help KEY` lists all choices of a type; KEY is {', '.join(others)}.\n"
    return text


def usage(name: str, command: Command) -> str:
    words = [word.upper() if word in _required(command) else f"[{word.upper()}]" for word in command.positional]
    if _takes_many(command):
        words.append("...")
    return " ".join(["gregale", name, *words, "[--key value ...]"])


def _check_not_empty(name: str, command: Command, words: Sequence[str]) -> None:
    """Raise `UserError` for an empty word, as of a shell's unset variable; a word that is empty by default may be."""
    defaults = {each.name: default_of(each) for each in fields(command.options)}
    for key, word in zip([*command.positional, *command.positional[-1:] * len(words)], words, strict=False):
        if not word and defaults.get(key) != "":
            raise UserError(f"{key.upper()} is empty. Usage: {usage(name, command)}")


def _check_complete(name: str, command: Command, given: dict[str, str], pairs: list[str]) -> None:
    keys = {_key(pair) for pair in pairs}
    for word in _required(command):
        if word not in given and word not in keys:
            raise UserError(f"{word.upper()} is missing. Usage: {usage(name, command)}")
        if word in given and word in keys:
            raise UserError(f"{word} is given twice, as {given[word]!r} and as `--{word}`; leave one of them out.")


def _required(command: Command) -> list[str]:
    """Return the required positional arguments."""
    optional = {each.name for each in fields(command.options) if default_of(each) is not REQUIRED}
    return [word for word in command.positional if word not in optional]


def _takes_many(command: Command) -> bool:
    """Return whether the last positional argument is a list of all remaining words."""
    last = command.positional[-1:]
    return bool(last) and get_origin(types_of(command.options).get(last[0])) is tuple


def _key(pair: str) -> str:
    return pair.removeprefix("--").partition("=")[0]


def render(config_class: type, topic: str | None = None, only: Collection[str] = ()) -> str:
    """Return the keys with type, default and meaning, under headings with the first part of the dotted key.

    Keys that only some choices of a `type` have are listed under these choices. With `topic`, a dotted key, the text
    has all choices below that key; without it, only the default choices. `only` limits the text to these keys and the
    keys below them. Raises `UserError` if no key is below the topic.
    """
    listed = [entry for entry in entries(config_class) if not only or _is_below(entry.key, only)]
    defaults = {entry.key: entry.default for entry in listed}
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in _of_default_choices(listed) if topic is None else _below(config_class, listed, topic):
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
    left_out = [entry for entry in listed if entry not in shown]
    hidden = {
        entry.choice.partition(" ")[0].removesuffix(".type") or entry.key.rpartition(".")[0] or entry.key
        for entry in left_out
    }
    hidden = {key.partition(".<")[0].removesuffix(".0") for key in hidden}  # elements of a mapping or a list
    return sorted(key for key in hidden if not any(key.startswith(f"{other}.") for other in hidden))


def _of_default_choices(listed: Sequence[Entry]) -> list[Entry]:
    """Return the keys of a configuration in which every `type` has its default."""
    shown: list[Entry] = []
    chosen: dict[str, object] = {}  # the defaults of shown keys; a key that depends on a hidden key is hidden too
    for entry in listed:
        key, _, names = entry.choice.partition(" ")
        if entry.by_topic:
            continue
        if not key or chosen.get(key) in names.split(", "):
            shown.append(entry)
            chosen.setdefault(entry.key, entry.default)
    return shown


def _is_below(key: str, others: Collection[str]) -> bool:
    return any(f"{key}.".startswith(f"{other}.") for other in others)


def _below(config_class: type, listed: Sequence[Entry], topic: str) -> list[Entry]:
    found = [entry for entry in listed if _is_below(entry.key, [topic])]
    if not found:
        near = suggestions(topic, config_class, {entry.key: entry for entry in listed})
        near = [each for each in near if any(_is_below(entry.key, [each]) for entry in listed)]
        first = ", ".join(sorted({entry.key.partition(".")[0] for entry in listed}))
        hint = did_you_mean(near) or f" The first parts of the keys are: {first}."
        raise UserError(f"--help {topic}: there is no such key.{hint}")
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
