"""Functions that read a configuration from a YAML file and dotted arguments, and write it as YAML."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import draccus
import yaml

from gregale.errors import UserError
from gregale.runs import batch_ramp, plugins
from gregale.settings import shortened, shown
from gregale.settings.decoding import (
    COMMAND_LINE,
    KEYWORD,
    TYPE,
    Decoder,
    Text,
    choice_name,
    is_list_at,
    is_registry,
    join,
    section_at,
)
from gregale.storage import StoragePath

Config = TypeVar("Config")
_NUMBERS = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float")}
_COLLECTIONS = {f"tag:yaml.org,2002:{kind}" for kind in ("seq", "map")}
_OCTAL = re.compile(r"[-+]?0[0-7_]+")


def load(
    config_class: type[Config],
    path: str | StoragePath | Mapping[str, Any] | None,
    arguments: Sequence[str] = (),
    keywords: Mapping[str, Any] | None = None,
) -> Config:
    """Load the configuration of a YAML file, with `--dotted.key value` arguments and keywords as overrides.

    Arguments:
    - `config_class`: a frozen dataclass, which may contain nested dataclasses, optional fields, lists, tuples, mappings
      of names and draccus registries (chosen by `type`)
    - `path`: the YAML file or object, a mapping as in a YAML file, or None for the defaults
    - `arguments`: `--key value`, `--key=value`, or `--key` alone for a flag; lists as `[1, 2]` or `1,2`; a section
      such as `{layers: 2}` keeps its other keys, unless it names another `type`
    - `keywords`: values of keys as in YAML; a text as in an argument

    It imports the `plugins` of the configuration before it decodes the other keys, see `load_plugins`.

    Raises `UserError` that names the key and its origin: unknown key, wrong type, unknown choice, missing key,
    duplicate key, missing file, invalid YAML.
    """
    given, file = (path, None) if isinstance(path, Mapping) else ({}, Path(path) if isinstance(path, str) else path)
    raw, origins = (deepcopy(dict(given)), {}) if file is None else read_yaml(file)
    words, pairs = split_arguments(arguments)
    if words:
        raise UserError(f"{words[0]!r} {COMMAND_LINE} belongs to no key; a value follows its key: `--steps 100`.")
    for pair in pairs:
        key, equals, value = pair.removeprefix("--").partition("=")
        _Overrides(config_class, raw, origins, COMMAND_LINE).set(key.split("."), Text(value) if equals else True)
    for key, value in (keywords or {}).items():
        value = Text(value) if isinstance(value, str) else value
        _Overrides(config_class, raw, origins, KEYWORD).set(key.split("."), value)
    decoder = Decoder(config_class, origins, _read_text)
    if plugins.KEY in {each.name for each in fields(config_class)}:  # type: ignore[arg-type]
        _import_plugins(decoder, raw, file)
    if batch_ramp.STAGES in {each.name for each in fields(config_class)}:  # type: ignore[arg-type]
        raw = batch_ramp.expanded(decoder, raw, origins)
    return decoder.decode(config_class, raw)


def decoded(config_class: type[Config], raw: Mapping[str, Any]) -> Config:
    """Return the configuration of plain values, as `load` does; its plugins have to be imported already."""
    return Decoder(config_class, {}, _read_text).decode(config_class, dict(raw))


def load_plugins(path: str | None, arguments: Sequence[str]) -> list[str]:
    """Import the plugins of a YAML file, or those of the argument `--plugins`, which replaces them; return their names.

    A file in a store, or of another user, runs no code of its own choice: its plugins have to be imported already, or
    named in the argument. Raises `UserError` that names the file and the line, as `load`.
    """
    raw, origins = ({}, {}) if path is None else read_yaml(Path(path))
    for pair in arguments:
        _, equals, value = pair.partition("=")
        raw[plugins.KEY], origins[plugins.KEY] = Text(value) if equals else True, COMMAND_LINE
    return _import_plugins(Decoder(plugins.PluginOptions, origins, _read_text), raw, Path(path) if path else None)


def _import_plugins(decoder: Decoder, raw: dict[str, Any], file: StoragePath | None) -> list[str]:
    if plugins.KEY not in raw:
        return []
    names, origin = decoder.decode(list[str], raw[plugins.KEY], plugins.KEY), decoder.origins.get(plugins.KEY)
    why = None if file is None or origin in (COMMAND_LINE, KEYWORD) else plugins.elsewhere(file)
    if file is None or why is None:
        plugins.import_plugins(names, f" ({origin})" if origin else "")
    else:
        plugins.check_imported(names, file, why)
    return names


def dump(config: Any) -> str:
    """Return a configuration as YAML with all keys, from which `load` reads an equal configuration."""
    return yaml.safe_dump(draccus.encode(config), sort_keys=False)


def split_arguments(
    arguments: Sequence[str], flags: Collection[str] = (), lists: Collection[str] = (), max_words: int = 0
) -> tuple[list[str], list[str]]:
    """Split a command line into words and keys; keys are `--key=value`, or `--key` alone for a flag that is true.

    - `flags`: keys without a value; the next word is the value only if it is `true` or `false`
    - `lists`: keys that take all words up to the next key (a shell expands `*.txt` to words), after `max_words` words
    - `max_words`: number of words that belong to no key
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
        if values and argument.removeprefix("--") in lists and len(words) >= max_words:
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
        value = values[0] if len(values) == 1 else json.dumps(values, ensure_ascii=False)  # JSON is also YAML
        pairs.append(f"{argument}={value}" if values else argument)
    return words, pairs


def _with_underscores(argument: str) -> str:
    """Convert `--require-fit` to `--require_fit`; dotted keys may contain the user's names and stay unchanged."""
    key, equals, value = argument.partition("=")
    return argument if "." in key else "--" + key.removeprefix("--").replace("-", "_") + equals + value


def read_yaml(path: StoragePath) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a YAML file; return its mapping, and the origin (file and line) of every dotted key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such configuration file.") from None
    except OSError as error:
        raise UserError(f"{path}: the configuration file cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}, so no YAML; save it as UTF-8.") from None
    origins: dict[str, str] = {}
    raw = _Reader(str(path), origins).read(text)
    if not isinstance(raw, dict | None):
        raise UserError(f"{path}: a configuration is a mapping (`steps: 100`), but this file holds {raw!r:.60}.")
    return raw or {}, origins


def _read_text(text: str, name: str) -> Any:
    return _Reader(name, {}).read(text)


class _Reader:
    """A YAML reader that records the line of every key and rejects duplicate keys."""

    def __init__(self, name: str, origins: dict[str, str]):
        self.name = name
        self.origins = origins

    def read(self, text: str) -> Any:
        try:
            # Inside the `try`, because the constructor of the loader raises for unprintable characters.
            self.loader = yaml.SafeLoader(text)
            node = self.loader.get_single_node()
            return None if node is None else self._build(node, "")
        except RecursionError:
            raise UserError(
                f"{self.name}: not readable as YAML: lists or mappings lie too deep in one another."
            ) from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise UserError(f"{self.name}{at}: not readable as YAML: {error.problem or error.context}.") from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise UserError(f"{self.name}, line {line}: not readable as YAML: {error.reason}.") from None

    def _build(self, node: yaml.Node, key: str) -> Any:
        if isinstance(node, yaml.CollectionNode) and node.tag not in _COLLECTIONS:
            raise self._unknown_tag(node)
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
            # PyYAML raises these for 31 February, for more digits than Python reads, and for `!!bool perhaps`.
            kind, line = node.tag.rpartition(":")[2], f"{self.name}, line {node.start_mark.line + 1}"
            raise UserError(f"{line}: {shortened(node.value)!r} looks like a YAML {kind}, but is not valid.") from None

    def _refuse_old_numbers(self, node: yaml.Node, key: str) -> None:
        """Reject texts that only YAML 1.1 reads as numbers: `1:30` as 90, and `010` as 8."""
        if node.tag not in _NUMBERS:
            return
        is_octal = _OCTAL.fullmatch(node.value) is not None
        if is_octal or ":" in node.value:
            kind = "an octal number" if is_octal else "a number to the base 60"
            line = f"{self.name}, line {node.start_mark.line + 1}"
            found = f"{f'`{key}` is ' if key else ''}{shortened(node.value)}"
            raise UserError(
                f"{line}: {found}, {kind} in YAML 1.1 ({shown(self.loader.construct_object(node))}). Write the number "
                "in decimal digits, without a 0 before them and without colons; in quotes it is a text."
            )

    def _unknown_tag(self, node: yaml.Node) -> UserError:
        line, tag = node.start_mark.line + 1, node.tag.replace("tag:yaml.org,2002:", "!!")
        return UserError(f"{self.name}, line {line}: the tag {shortened(tag)} is unknown here; remove it.")

    def _build_at(self, node: yaml.Node, key: str, start: yaml.Node) -> Any:
        self.origins[key] = f"{self.name}, line {start.start_mark.line + 1}"
        return self._build(node, key)

    def _refuse_duplicates(self, node: yaml.MappingNode, key: str) -> None:
        lines: dict[str, int] = {}
        for name_node, _ in node.value:
            name, line = name_node.value, name_node.start_mark.line + 1
            if not isinstance(name, str):
                raise UserError(f"{self.name}, line {line}: a key has to be a single word, not a list or a mapping.")
            if name_node.tag.startswith("!"):
                raise self._unknown_tag(name_node)
            if name in lines:
                raise UserError(
                    f"{self.name}: `{join(key, name)}` stands twice, in line {lines[name]} and in line {line}; remove "
                    f"one of them."
                )
            lines[name] = line


@dataclass(frozen=True)
class _Overrides:
    """A tree of mappings with values from outside of a file, and the origins of all values."""

    config_class: type
    raw: dict[str, Any]
    origins: dict[str, str]
    origin: str  # of the values to set

    def set(self, path: Sequence[str], value: Any) -> None:
        """Set a dotted key and create missing mappings; a section changes only the given keys."""
        key, (*above, last) = ".".join(path), path
        node = self._node(above, key)
        before = node.get(last)
        section = section_at(self.config_class, path)
        if section is not None:
            if isinstance(value, Text) and value.lstrip().startswith("{"):
                value = _read_text(value, f"`{key}` ({self.origin})")
            if isinstance(before, dict) and isinstance(value, dict) and not _has_another_type(section, before, value):
                for name, each in value.items():
                    self.set([*path, name], each)
                return
        node[last] = value
        for below in [other for other in self.origins if other.startswith(f"{key}.")]:
            del self.origins[below]
        self.origins[key] = self.origin

    def _node(self, path: Sequence[str], key: str) -> dict:
        """Return the mapping at a dotted key; create it if absent."""
        node: Any = self.raw
        for depth, name in enumerate(path, 1):
            above = ".".join(path[:depth])
            if is_list_at(self.config_class, path[:depth]):
                raise UserError(
                    f"`{key}` ({self.origin}): `{above}` is a list, which is given as a whole: `--{above} '[...]'`."
                )
            inner = node.get(name)
            if inner is None:
                inner = node[name] = {}
            if not isinstance(inner, dict):
                origin = f" ({self.origins[above]})" if above in self.origins else ""
                raise UserError(
                    f"`{key}` ({self.origin}): nothing lies below `{above}`, which is {str(inner)!r}{origin}; "
                    f"`--{above} VALUE` would replace it."
                )
            node = inner
        return node


def _has_another_type(section: tuple[Any, Any], before: dict, value: dict) -> bool:
    """Return whether a section has a new choice, so that its earlier keys belong to another choice."""
    kind, default = section
    return is_registry(kind) and TYPE in value and value[TYPE] != before.get(TYPE, choice_name(kind, default))
