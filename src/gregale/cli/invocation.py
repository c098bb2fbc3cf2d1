"""Invocation of a command: it fills the options and the configuration from the arguments."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from typing import get_origin

from gregale.errors import UserError
from gregale.programs.command import Command
from gregale.runs import plugins
from gregale.runs.parsing import load, load_plugins, split_arguments
from gregale.settings.config_schema import REQUIRED, default_of, entries, types_of
from gregale.settings.help import render, topics

CONFIG = "config"


def invoke(name: str, command: Command, arguments: Sequence[str]) -> int:
    """Run `command` with its arguments (without its name); return its exit code.

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
        pairs = [pair for pair in pairs if _key(pair) != plugins.KEY]
    given = dict(zip(command.positional, words, strict=False))
    _check_complete(name, command, given, pairs)
    path = given.pop(CONFIG, None) if command.config else None
    for_options = [f"--{key}={word}" for key, word in given.items()]
    for_options += [pair for pair in pairs if command.config is None or _key(pair).split(".")[0] in own]
    options = load(command.options, None, for_options)
    if command.config is None:
        return command.main(options)
    config = load(command.config, path, [pair for pair in pairs if pair not in for_options])
    from gregale.runs.resolved_config import resolved  # late: a command without a configuration does not import JAX

    return command.main(options, resolved(config))


def _split(command: Command, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words and the keys of a command line."""
    parts = [command.options] if command.config is None else [command.options, command.config]
    flags = {entry.key for part in parts for entry in entries(part) if entry.type == "bool"}
    lists = {entry.key for entry in entries(command.options) if entry.type == "list of str"}
    lists |= {plugins.KEY} if command.plugins else set()
    words, pairs = split_arguments(arguments, flags, lists, len(command.positional))
    fields_of = {f"--{alias}": f"--{name}" for alias, name in command.aliases.items()}
    return words, ["".join((fields_of.get(key, key), *rest)) for key, *rest in (pair.partition("=") for pair in pairs)]


def _imported(command: Command, words: Sequence[str], pairs: Sequence[str]) -> bool:
    """Import the plugins that the command line and the configuration file name; return whether there are any.

    A pipe (`gregale train <(...)`) can be read once, so `load` alone reads it.
    """
    if not (command.plugins or _reads_plugins(command)):
        return False
    named = [pair for pair in pairs if _key(pair) == plugins.KEY]
    place = command.positional.index(CONFIG) if command.config and CONFIG in command.positional else len(words)
    path = next((word for word in words[place : place + 1] if os.path.isfile(word)), None)
    return bool(load_plugins(path, named))


def _reads_plugins(command: Command) -> bool:
    return command.config is not None and plugins.KEY in {each.name for each in fields(command.config)}


def command_help(
    name: str, summary: str, command: Command, topic: str | None = None, arguments: Sequence[str] = ()
) -> str:
    """Return the help text of a command: usage, options and configuration keys, or all keys below `topic`.

    - `arguments`: those before `--help`, whose plugins add choices if they can be imported
    """
    with suppress(UserError):
        _imported(command, *_split(command, arguments))
    if topic is not None and command.config:
        return render(command.config, topic, command.reads)
    text = f"usage: {usage(name, command)}\n\n{summary}\n"
    if fields(command.options):
        text += f"\noptions:\n{render(command.options)}"
    if command.plugins:
        text += render(plugins.PluginOptions)
    if command.config:
        heading = "keys that it reads from a run's YAML file" if command.reads else "keys of the YAML file"
        text += f"\n{heading}, each also an argument:\n{render(command.config, only=command.reads)}"
        if others := topics(command.config, command.reads):
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
