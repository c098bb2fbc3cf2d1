"""Functions that read a configuration from a YAML file and dotted arguments, and write it as YAML.

They import the plugins that it names: the user's modules, which register choices (models, optimizers, sources and so
on). They expand the short form of stages that change the batch size: `batch.size: {0: 256, 2000: 512}`.
"""

import hashlib
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import draccus
import yaml

from gregale.errors import UserError, own_frame
from gregale.settings import Settings, in_steps, setting, shortened, shown
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
    known_entries,
    section_at,
)
from gregale.storage import ObjectPath, StoragePath

PLUGINS = "plugins"
LONGEST_MESSAGE = 300
TRUSTED = (0,)  # users whose files may name code: root can run any code anyway


@dataclass(frozen=True)
class PluginOptions(Settings):
    """The option `--plugins` of commands that read the configuration of a run."""

    plugins: list[str] = setting(list, "modules to import first, for a run with plugins")


def import_plugins(names: Sequence[str], origin: str = "") -> None:
    """Import modules in order, before a configuration that uses their choices is decoded.

    The current folder is searched too, after all others, so that none of its files hides an installed package.

    - `origin`: where the names stand, for messages

    Raises `UserError` for a module that does not exist, raises an exception, uses a device, or misspells a method.
    """
    before_all = sys.modules.keys() - names
    folder = str(Path.cwd())
    if names and folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()  # a notebook may just have written a module
    for name in names:
        if name in sys.modules:
            continue
        if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
            raise UserError(
                f"`{PLUGINS}`{origin}: {shown(name)} is no name of a module. Write it as `import` has it, without .py "
                "and with dots between folders: my_package.my_module."
            )
        before = _uses_devices()
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise UserError(f"`{PLUGINS}`{origin}: {_import_problem(name, error, folder)}") from error
        if _uses_devices() and not before:
            raise UserError(
                f"`{PLUGINS}`{origin}: {shown(name)} computes with JAX when it is imported, before the devices are set "
                "up. Make its arrays in a function."
            )
        known_entries.cache_clear()
    for name in sorted(sys.modules.keys() - before_all):
        for cls in [*getattr(sys.modules[name], "__dict__", {}).values()]:
            if issubclass(type(cls), type) and cls.__module__ == name and not name.startswith("gregale."):
                _check_methods(cls, origin)


def elsewhere(path: StoragePath) -> str | None:
    """Return why a configuration file may not choose code that this process runs; None for the user's own file."""
    if isinstance(path, ObjectPath):
        return "it is in a store"
    owner, user = path.stat().st_uid, os.geteuid()
    return None if owner in (user, *TRUSTED) else f"it belongs to another user ({owner}, you are {user})"


def check_imported(names: Sequence[str], path: StoragePath, why: str) -> None:
    """Raise `UserError` if a file from elsewhere names a module that this process has not imported already.

    - `why`: of `elsewhere`
    """
    if missing := [name for name in names if name not in sys.modules]:
        raise UserError(
            f"{path} names plugins ({', '.join(missing)}), which are code, and {why}. None of them was imported. To "
            f"import your own modules of these names, give them: `--{PLUGINS} {','.join(names)}`."
        )


def code_digests(names: Sequence[str]) -> dict[str, str]:
    """Return a digest of the file of each module; empty for a module without one."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return {
        name: hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file else "" for name, file in files.items()
    }


def _uses_devices() -> bool:
    """Return whether JAX has started a backend in this process; JAX has no public function for it."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def _methods(cls: type) -> dict[str, CodeType]:
    """Return the code of the public functions and properties in the body of a class."""
    functions = (inspect.unwrap(getattr(each, "fget", each)) for each in vars(cls).values())
    codes = {code.co_name: code for each in functions if (code := getattr(each, "__code__", None))}
    return {n: code for n, code in codes.items() if code.co_qualname == f"{cls.__qualname__}.{n}" and n[0] != "_"}


def _check_methods(cls: type, origin: str) -> None:
    """Raise `UserError` for a method that overrides nothing and has nearly the name of a method of Gregale's bases."""
    bases = [each for each in cls.__mro__[1:] if each.__module__.startswith("gregale.")]
    known = {name: code for each in bases for name, code in _methods(each).items() if name not in vars(cls)}
    for name, code in _methods(cls).items() if bases else ():
        for close in get_close_matches(name, known, 1, 0.75):  # `inti` and `init` have 0.75
            plural = name.removesuffix("s") == close.removesuffix("s")  # no mistake without arguments
            if not hasattr(super(cls, cls), name) and (not plural or code.co_argcount == known[close].co_argcount > 1):
                raise UserError(
                    f"`{PLUGINS}`{origin}: {cls.__name__}.{name} ({code.co_filename}, line {code.co_firstlineno}) "
                    f"overrides no inherited method. Write `{close}`, or `_{name}` for a function of your own."
                )


def _import_problem(name: str, error: BaseException, folder: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        return (
            f"there is no module {shown(name)}; it was looked for in the installed packages and in {folder}. A file "
            f"my_module.py in that folder is `{PLUGINS}: [my_module]`."
        )
    if isinstance(error, SyntaxError):
        file, line = error.filename, error.lineno
    else:
        frame = own_frame(error)
        file, line = (frame.filename, frame.lineno) if frame else (None, None)
    place = f" ({file}, line {line})" if file else ""
    message = textwrap.shorten(str(error), LONGEST_MESSAGE, placeholder="...")
    return f"{shown(name)} could not be imported{place}: {type(error).__name__}{f': {message}' if message else '.'}"


SIZE, STAGES, FROM = "batch.size", "stages", "from"


class _GivenStage(NamedTuple):
    key: str  # at which the stage is given
    first: float  # steps before the stage
    values: dict[str, Any]


def expand_batch_ramp(decoder: Decoder, raw: dict[str, Any], origins: dict[str, str]) -> dict[str, Any]:
    """Return the plain values of a configuration, in which sizes by step in `batch.size` are stages.

    A stage of `stages` at the same step takes the size in, unless it has a `batch.size` itself. The `origins` of stages
    move with them.

    Raises `UserError` for a key that is no step, or without a size for step 0.
    """
    batch = raw.get("batch")
    size = batch.get("size") if isinstance(batch, dict) else None
    is_ramp = isinstance(size, dict) or (isinstance(size, Text) and size.lstrip().startswith("{"))
    if not isinstance(batch, dict) or not is_ramp or "steps" not in raw:
        return raw
    steps, at = decoder.decode(int, raw["steps"], "steps"), origins.get(SIZE)
    sizes = decoder.decode(dict[str, int], size, SIZE)
    ramp = sorted((in_steps(begin := _ramp_step(name, at), steps), begin, name) for name in sizes)
    if not ramp or ramp[0][0]:
        raise _ramp_refusal("has no size for step 0", at)
    written = decoder.decode(list[dict[str, Any]], raw.get(STAGES, []), STAGES)
    found = [_GivenStage(f"{STAGES}.{number}", _first_step(each, steps), each) for number, each in enumerate(written)]
    for first, begin, name in ramp[1:]:
        if at is not None:
            origins.setdefault(f"{SIZE}.{name}", at)
        _add_stage(found, _GivenStage(f"{SIZE}.{name}", first, {FROM: begin, "batch": {"size": sizes[name]}}))
    before = {key: origins.pop(key) for key in [*origins] if key.startswith((f"{STAGES}.", f"{SIZE}."))}
    for number, each in enumerate(found):
        below = [key for key in before if key == each.key or key.startswith(f"{each.key}.")]
        origins.update({f"{STAGES}.{number}{key.removeprefix(each.key)}": before[key] for key in below})
    return {**raw, "batch": {**batch, "size": sizes[ramp[0][2]]}, STAGES: [each.values for each in found]}


def _add_stage(found: list[_GivenStage], stage: _GivenStage) -> None:
    """Add a size to the written stage at its step, or as a stage before the first one that begins later."""
    for place, each in enumerate(found):
        if each.first == stage.first and each.key.startswith(STAGES):
            if isinstance(own := each.values.get("batch", {}), dict):
                found[place] = each._replace(values={**each.values, "batch": {**stage.values["batch"], **own}})
            return
    place = next((place for place, each in enumerate(found) if each.first > stage.first), len(found))
    found.insert(place, stage)


def _first_step(stage: Mapping[str, Any], steps: int) -> float:
    """Return the steps before a written stage; infinite for an invalid `from`, which `stages_of` refuses."""
    begin = stage.get(FROM)
    if isinstance(begin, bool) or not isinstance(begin, int | float) or not begin >= 0:
        return float("inf")
    return in_steps(begin, steps)


def _ramp_step(name: str, at: str | None) -> float:
    try:
        step = float(name)
    except ValueError:
        step = -1.0
    if not 0 <= step < float("inf"):
        raise _ramp_refusal(f"has the key {shown(str(name))}", at)
    return int(step) if step == step // 1 else step


def _ramp_refusal(found: str, at: str | None) -> UserError:
    return UserError(
        f"{SIZE} {found}{f' ({at})' if at else ''}; sizes by step are a mapping of steps, or fractions of the run, to "
        "numbers of sequences, and begin with step 0: `{0: 256, 2000: 512}`."
    )


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
    if PLUGINS in {each.name for each in fields(config_class)}:  # type: ignore[arg-type]
        _import_plugins(decoder, raw, file)
    if STAGES in {each.name for each in fields(config_class)}:  # type: ignore[arg-type]
        raw = expand_batch_ramp(decoder, raw, origins)
    return decoder.decode(config_class, raw)


def decoded(config_class: type[Config], raw: Mapping[str, Any]) -> Config:
    """Return the configuration of plain values, as `load` does; its plugins have to be imported already."""
    return Decoder(config_class, {}, _read_text).decode(config_class, dict(raw))


def load_plugins(words: Sequence[str], pairs: Sequence[str]) -> list[str]:
    """Import the plugins of the first YAML file, or those of `--plugins`, which replace them; return their names.

    A file in a store, or of another user, runs no code of its own choice: its plugins have to be imported already, or
    named in the argument. Raises `UserError` that names the file and the line, as `load`.
    """
    file = next((Path(word) for word in words if os.path.isfile(word)), None)
    raw, origins = ({}, {}) if file is None else read_yaml(file)
    for key, equals, value in (pair.partition("=") for pair in pairs):
        if key == f"--{PLUGINS}":
            raw[PLUGINS], origins[PLUGINS] = Text(value) if equals else True, COMMAND_LINE
    return _import_plugins(Decoder(PluginOptions, origins, _read_text), raw, file)


def _import_plugins(decoder: Decoder, raw: dict[str, Any], file: StoragePath | None) -> list[str]:
    if PLUGINS not in raw:
        return []
    names, origin = decoder.decode(list[str], raw[PLUGINS], PLUGINS), decoder.origins.get(PLUGINS)
    why = None if file is None or origin in (COMMAND_LINE, KEYWORD) else elsewhere(file)
    if file is None or why is None:
        import_plugins(names, f" ({origin})" if origin else "")
    else:
        check_imported(names, file, why)
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
    except IsADirectoryError:
        new = f"gregale new my.yaml --text '{path}/**/*.txt'"
        raise UserError(f"{path} is a folder, not a configuration file. `{new}` writes one for its text.") from None
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
