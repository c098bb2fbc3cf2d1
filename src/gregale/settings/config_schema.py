"""The fields of a configuration class as dotted keys with type names, for help and for error messages."""

import types
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import draccus

from gregale.settings import Fixed, Range

TYPE = draccus.CHOICE_TYPE_KEY
REQUIRED = MISSING

TYPE_NAMES = {bool: "bool", int: "int", float: "float", str: "str", Path: "path", type(None): "null"}


@dataclass(frozen=True)
class Entry:
    """One dotted key: its type name, its default (`REQUIRED` if there is none) and the metadata of its field.

    - `help`, `range`, `aliases`, `fixed`: see `gregale.settings`; the type name contains the choices
    - `by_topic`: the help has it only with `--help TOPIC`
    - `choice`: the choice that adds this key or gives it this default (`optimizer.type lion`); "" for none
    """

    key: str
    type: str
    default: Any
    help: str
    range: Range | None = None
    aliases: tuple[str, ...] = ()
    fixed: Fixed | None = None
    choice: str = ""
    by_topic: bool = False

    @property
    def meaning(self) -> str:
        return f"{self.help} [{self.range.signs()}]".lstrip() if self.range else self.help


def entries(config_class: type, prefix: str = "", default: Any = REQUIRED) -> Iterator[Entry]:
    """Yield every key of a configuration class, depth first; the defaults come from the value `default`.

    A field whose metadata has `keys_of` is one entry, because its keys are those of another field.
    """
    for each in fields(config_class):
        kind = types_of(config_class)[each.name]
        key, data = join(prefix, each.name), each.metadata
        about = data.get("help", ""), data.get("range"), data.get("aliases", ()), data.get("fixed")
        entry = Entry(key, type_name(kind, data.get("choices", ())), default_of(each, default), *about)
        entry = replace(entry, by_topic="by_topic" in data)
        if "keys_of" in each.metadata:
            yield replace(entry, help=f"{entry.help}; keys as in {each.metadata['keys_of']}")
        else:
            begins_anew = "begins_anew" in each.metadata  # see `gregale.runs.config_diff`
            for found in _entries_of_field(entry, kind):
                yield replace(found, fixed=None) if begins_anew else found


def section_at(config_class: type, path: Sequence[str]) -> tuple[Any, Any] | None:
    """Return the class (or the registry of classes) and the default of the section at a dotted key.

    Returns None for a value. Lists and mappings of names are values; only their elements are sections.
    """
    kind, default = _type_at(config_class, path)
    section = next(filter(is_dataclass, _members(kind)), None)
    return None if section is None else (section, default)


def is_list_at(config_class: type, path: Sequence[str]) -> bool:
    """Return whether the value at a dotted key is a list."""
    kind, _ = _type_at(config_class, path)
    return any(get_origin(each) in (list, tuple) for each in _members(kind))


def _type_at(config_class: type, path: Sequence[str]) -> tuple[Any, Any]:
    """Return the type and the default at a dotted key; (None, `REQUIRED`) if there is no such key."""
    kind, default = config_class, REQUIRED
    for name in path:
        kind, default = _below(kind, name, default)
    return kind, default


def _below(kind: Any, name: str, default: Any) -> tuple[Any, Any]:
    """Return the type and the default of a type's member by name; (None, `REQUIRED`) if there is none."""
    for each in _members(kind):
        if is_dataclass(each):
            classes = [each, *choices(each).values()] if is_registry(each) else [each]
            found = [(owner, inner) for owner in classes for inner in fields(owner) if inner.name == name]
            if found:
                owner, inner = found[0]
                return types_of(owner)[name], default_of(inner, default)
        elif get_origin(each) is dict:
            return get_args(each)[1], REQUIRED
    return None, REQUIRED


def _members(kind: Any) -> Sequence[Any]:
    return get_args(kind) if is_union(kind) else (kind,)


@cache
def types_of(config_class: type) -> dict[str, Any]:
    """Return the types of a class's fields by name; cached, because resolving them is slow."""
    return get_type_hints(config_class)


def _entries_of_field(entry: Entry, kind: Any) -> Iterator[Entry]:
    inner, below = _nested(kind)
    if inner is None:
        yield entry
        return
    if is_registry(inner):
        yield from _entries_of_registry(replace(entry, key=entry.key + below), inner)
        return
    if inner is not kind:
        yield entry
    yield from entries(inner, entry.key + below, entry.default)


def _entries_of_registry(entry: Entry, registry: Any) -> Iterator[Entry]:
    """Yield the choice itself, the shared keys, then the keys that a choice adds or gives another default."""
    key, value = entry.key, entry.default
    known = choices(registry)
    default = choice_name(registry, value)
    yield replace(entry, key=join(key, TYPE), type=" | ".join(known), default=REQUIRED if default is None else default)
    shared = list(entries(registry, key, value if isinstance(value, registry) else REQUIRED))
    yield from shared
    chosen: dict[str, tuple[Entry, list[str]]] = {}  # by the text of an entry, whose default may be a mapping
    for name, choice in known.items():
        for entry in entries(choice, key, value if type(value) is choice else REQUIRED):
            if entry not in shared:
                chosen.setdefault(repr(entry), (entry, []))[1].append(name)
    for entry, names in chosen.values():
        only = f"{join(key, TYPE)} {', '.join(names)}" if len(names) < len(known) else ""
        yield replace(entry, choice=entry.choice or only)


def _nested(kind: Any) -> tuple[Any, str]:
    """Return the configuration class inside a type, and the suffix of the dotted key of an element."""
    if is_dataclass(kind):
        return kind, ""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_union(kind):
        found = [_nested(argument) for argument in arguments]
        return next((each for each in found if each[0] is not None), (None, ""))
    if origin in (list, tuple) and arguments and is_dataclass(arguments[0]):
        return arguments[0], ".0"
    if origin is dict and is_dataclass(arguments[1]):
        return arguments[1], ".<name>"
    return None, ""


def type_name(kind: Any, options: Collection[str] = ()) -> str:
    """Return a type's name: `int | null`, `list of str`, or the choices of a text, `options`: `matrices | all`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is str and options:
        return " | ".join(options)
    if kind in TYPE_NAMES:
        return TYPE_NAMES[kind]
    if is_union(kind):
        return " | ".join(type_name(argument, options) for argument in arguments)
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return f"list of {type_name(arguments[0], options)}"
    if origin is tuple:
        return f"[{', '.join(type_name(argument) for argument in arguments)}]"
    if origin is dict:
        return f"mapping of names to {type_name(arguments[1])}"
    return "mapping"


def default_of(each: Field, owner: Any = REQUIRED) -> Any:
    """Return the default of a field, or the value of its owner if the owner is a default itself."""
    if owner is not REQUIRED and hasattr(owner, each.name):
        return getattr(owner, each.name)
    return each.default if each.default_factory is MISSING else each.default_factory()


def is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def is_registry(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, draccus.ChoiceRegistry)


def choices(registry: Any) -> dict[str, type]:
    """Return name -> class of the choices of a registry; a choice has itself as its only choice."""
    return {name: choice for name, choice in registry.get_known_choices().items() if issubclass(choice, registry)}


def choice_name(registry: Any, value: Any = REQUIRED) -> str | None:
    """Return the choice name of a value, or the registry's default choice; None if there is none."""
    known = choices(registry)
    chosen = next((name for name, choice in known.items() if choice is type(value)), None)
    if chosen is None and len(known) == 1:
        return next(iter(known))
    return chosen or registry.default_choice_name()


def join(prefix: str, name: object) -> str:
    return f"{prefix}.{name}" if prefix else str(name)
