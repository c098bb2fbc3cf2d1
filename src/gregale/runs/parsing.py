"""Reads a configuration from a YAML file and dotted arguments, and writes it back."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import draccus
import yaml

from gregale.errors import UserError
from gregale.settings import shortened, shown
from gregale.settings.config_schema import TYPE, choice_name, is_list_at, is_registry, join, section_at
from gregale.settings.decoding import COMMAND_LINE, Decoder, Text
from gregale.storage import StoragePath

Config = TypeVar("Config")
_NUMBERS = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float")}
_OCTAL = re.compile(r"[-+]?0[0-7_]+")


def load(config_class: type[Config], path: str | StoragePath | None, arguments: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file, with `--dotted.key value` arguments on top.

    Arguments:
    - `config_class`: a frozen dataclass; nested dataclasses, optional fields, lists, tuples, mappings of names and
      draccus registries (chosen by `type`) are understood
    - `path`: the YAML file or object, or None for the defaults
    - `arguments`: `--key value`, `--key=value`, or `--key` alone for a flag; lists as `[1, 2]` or `1,2`; of a section
      given as `{layers: 2}` the other keys stay, unless it names another `type`

    Raises `UserError` that names the key and the place: unknown key, wrong type, unknown choice, missing key, duplicate
    key, a file that is missing or no YAML.
    """
    raw, places = ({}, {}) if path is None else read_yaml(Path(path) if isinstance(path, str) else path)
    words, pairs = split_arguments(arguments)
    if words:
        raise UserError(f"{words[0]!r} {COMMAND_LINE} belongs to no key; a value follows its key: `--steps 100`.")
    for pair in pairs:
        key, equals, value = pair.removeprefix("--").partition("=")
        _Overrides(config_class, raw, places).set(key.split("."), Text(value) if equals else True)
    return Decoder(config_class, places, _read_text).decode(config_class, raw)


def dump(config: Any) -> str:
    """A configuration as YAML that `load` reads back to an equal one: every key, defaults too."""
    return yaml.safe_dump(draccus.encode(config), sort_keys=False)


def split_arguments(
    arguments: Sequence[str], flags: Collection[str] = (), lists: Collection[str] = (), most_words: int = 0
) -> tuple[list[str], list[str]]:
    """Splits a command line into words and keys, the keys as `--key=value` (`--key` alone: a flag, which is true).

    - `flags`: keys that need no value, so that the word after one is not its value unless it is `true` or `false`
    - `lists`: keys that take all words up to the next key, as a shell makes them of `*.txt`, once there are
    - `most_words`: words that belong to no key
    """
    words, pairs = [], []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            words.append(argument)
            continue
        argument = _with_underscores(argument)
        is_flag = argument.removeprefix("--") in flags
        has_value = rest and not rest[0].startswith("--") and (not is_flag or rest[0] in ("true", "false"))
        values = [rest.pop(0)] if has_value and "=" not in argument else []
        if values and argument.removeprefix("--") in lists and len(words) >= most_words:
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
        pairs.append(f"{argument}={_as_one(values)}" if values else argument)
    return words, pairs


def _as_one(values: list[str]) -> str:
    """Several words as a list in YAML, which JSON is too."""
    return values[0] if len(values) == 1 else json.dumps(values, ensure_ascii=False)


def _with_underscores(argument: str) -> str:
    """`--require-fit` is `--require_fit`; names in dotted keys may be the user's own and stay as they are."""
    key, equals, value = argument.partition("=")
    return argument if "." in key else "--" + key.removeprefix("--").replace("-", "_") + equals + value


def read_yaml(path: StoragePath) -> tuple[dict[str, Any], dict[str, str]]:
    """The mapping in a YAML file, and for every dotted key in it where it stands."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such configuration file.") from None
    except OSError as error:
        raise UserError(f"{path}: the configuration file cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}, so no YAML; save it as UTF-8.") from None
    places: dict[str, str] = {}
    raw = _Reader(str(path), places).read(text)
    if not isinstance(raw, dict | None):
        raise UserError(f"{path}: a configuration is a mapping (`steps: 100`), but this file holds {raw!r:.60}.")
    return raw or {}, places


def _read_text(text: str, key: str) -> Any:
    return _Reader(f"`--{key}` {COMMAND_LINE}", {}).read(text)


class _Reader:
    """Reads YAML, remembers the line of every key and refuses a key that stands twice."""

    def __init__(self, name: str, places: dict[str, str]):
        self.name = name
        self.places = places

    def read(self, text: str) -> Any:
        try:
            # Inside the `try`: PyYAML looks for unprintable characters when the loader is made.
            self.loader = yaml.SafeLoader(text)
            node = self.loader.get_single_node()
            return None if node is None else self._build(node, "")
        except RecursionError:
            raise UserError(
                f"{self.name}: not readable as YAML: lists or mappings lie too deep in one another."
            ) from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise UserError(f"{self.name}{place}: not readable as YAML: {error.problem or error.context}.") from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise UserError(f"{self.name}, line {line}: not readable as YAML: {error.reason}.") from None

    def _build(self, node: yaml.Node, key: str) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self._build_at(item, join(key, i), item) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return self._scalar(node, key)
        self._refuse_duplicates(node, key)
        self.loader.flatten_mapping(node)
        built = {}
        for name_node, value_node in node.value:
            built[name_node.value] = self._build_at(value_node, join(key, name_node.value), name_node)
        return built

    def _scalar(self, node: yaml.Node, key: str) -> Any:
        self._refuse_old_numbers(node, key)
        try:
            return self.loader.construct_object(node, deep=True)
        except (ValueError, ArithmeticError, LookupError, AttributeError):
            # What PyYAML raises for the 31st of February, for more digits than Python reads, for `!!bool perhaps`.
            kind, place = node.tag.rpartition(":")[2], f"{self.name}, line {node.start_mark.line + 1}"
            raise UserError(f"{place}: {shortened(node.value)!r} looks like a YAML {kind}, but it is none.") from None

    def _refuse_old_numbers(self, node: yaml.Node, key: str) -> None:
        """Refuses what only YAML 1.1 takes for numbers: `1:30` for 90, and `010` for 8."""
        if node.tag not in _NUMBERS:
            return
        is_octal = _OCTAL.fullmatch(node.value) is not None
        if is_octal or ":" in node.value:
            kind = "an octal number" if is_octal else "a number to the base 60"
            place = f"{self.name}, line {node.start_mark.line + 1}"
            found = f"{f'`{key}` is ' if key else ''}{shortened(node.value)}"
            raise UserError(
                f"{place}: {found}, {kind} in YAML 1.1 ({shown(self.loader.construct_object(node))}). Write the number "
                "in decimal digits, without a 0 before them and without colons; in quotes it is a text."
            )

    def _build_at(self, node: yaml.Node, key: str, start: yaml.Node) -> Any:
        self.places[key] = f"{self.name}, line {start.start_mark.line + 1}"
        return self._build(node, key)

    def _refuse_duplicates(self, node: yaml.MappingNode, key: str) -> None:
        lines: dict[str, int] = {}
        for name_node, _ in node.value:
            name, line = name_node.value, name_node.start_mark.line + 1
            if not isinstance(name, str):
                raise UserError(f"{self.name}, line {line}: a key has to be a single word, not a list or a mapping.")
            if name in lines:
                raise UserError(
                    f"{self.name}: `{join(key, name)}` stands twice, in line {lines[name]} and in line {line}; remove "
                    f"one of them."
                )
            lines[name] = line


@dataclass(frozen=True)
class _Overrides:
    """Puts values of the command line into a tree of mappings, and notes where they came from."""

    config_class: type
    raw: dict[str, Any]
    places: dict[str, str]

    def set(self, path: Sequence[str], value: Any) -> None:
        """Sets a dotted key, making the mappings on the way; of a section only the keys that are given."""
        key, (*above, last) = ".".join(path), path
        node = self._node(above, key)
        before = node.get(last)
        section = section_at(self.config_class, path)
        if section is not None:
            if isinstance(value, Text) and value.lstrip().startswith("{"):
                value = _read_text(value, key)
            if isinstance(before, dict) and isinstance(value, dict) and not _has_another_type(section, before, value):
                for name, each in value.items():
                    self.set([*path, name], each)
                return
        node[last] = value
        for below in [place for place in self.places if place.startswith(f"{key}.")]:
            del self.places[below]
        self.places[key] = COMMAND_LINE

    def _node(self, path: Sequence[str], key: str) -> dict:
        """Return the mapping at a dotted key, made if there is none."""
        node: Any = self.raw
        for depth, name in enumerate(path, 1):
            above = ".".join(path[:depth])
            if is_list_at(self.config_class, path[:depth]):
                raise UserError(
                    f"`--{key}` {COMMAND_LINE}: `{above}` is a list, which is given as a whole: `--{above} '[...]'`."
                )
            inner = node.get(name)
            if inner is None:
                inner = node[name] = {}
            if not isinstance(inner, dict):
                place = f" ({self.places[above]})" if above in self.places else ""
                raise UserError(
                    f"`--{key}` {COMMAND_LINE}: nothing lies below `{above}`, which is {str(inner)!r}{place}; "
                    f"`--{above} VALUE` would replace it."
                )
            node = inner
        return node


def _has_another_type(section: tuple[Any, Any], before: dict, value: dict) -> bool:
    """Whether a section is chosen anew, so that the keys before were those of another choice."""
    kind, default = section
    return is_registry(kind) and TYPE in value and value[TYPE] != before.get(TYPE, choice_name(kind, default))
