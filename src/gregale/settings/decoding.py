"""Values of a configuration from YAML and the command line: their schema, checks, and messages about unknown keys.

`other_projects.toml` has a row for each key; `docs/migration.md` shows them, and messages about unknown keys look keys
up in them. `<name>` in a key stands for any name.

The decoder collects the mistakes of all keys (unknown, missing, of a wrong type, out of range) and raises them as one
error. draccus provides the registries of choices and the encoding. This module has its own decoder, because that of
draccus reports class names and hides the errors of configuration classes.
"""

import re
import tomllib
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import draccus

from gregale.errors import KeyedError, Mistakes, UserError
from gregale.settings import Fixed, Range, Settings, did_you_mean, invalid_values, shortened, shown

TYPE = draccus.CHOICE_TYPE_KEY
REQUIRED = MISSING

TYPE_NAMES = {Any: "any value", bool: "bool", int: "int", float: "float", str: "str", Path: "path", type(None): "null"}


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
            begins_anew = "begins_anew" in each.metadata  # see `gregale.runs.stages`
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


MOST_SHOWN = 8


class Counterpart(NamedTuple):
    """A row of the table; `ours` is "" if there is no counterpart."""

    project: str
    theirs: str
    ours: str = ""
    note: str = ""

    @property
    def sentence(self) -> str:
        """Return the row as a part of a message."""
        found = f"`{self.theirs}` of {self.project} "
        found += f"is `{self.ours}` here" if self.ours else "has no counterpart here"
        return f"{found} ({self.note})" if self.note else found


@cache
def projects() -> dict[str, dict[str, Any]]:
    """Return each project's name with `files` (its keys' origin), `as_of` (their state) and `keys` (the rows)."""
    return tomllib.loads((files("gregale.settings") / "other_projects.toml").read_text(encoding="utf-8"))


@cache
def counterparts() -> tuple[Counterpart, ...]:
    """Return the rows of all projects in the order of the table."""
    return tuple(Counterpart(project, *row) for project, table in projects().items() for row in table["keys"])


@cache
def names_of(key: str) -> tuple[str, ...]:
    """Return the names that other projects have for a key of ours, without the sections above them.

    Only names with an underscore, because shorter ones (`interval`, `mode`) say little without their section. The outer
    optimizer has the names of the optimizer.
    """
    ours: dict[str, set[str]] = {}
    for row in counterparts():
        ours.setdefault(_written(row.theirs).rpartition(".")[2], set()).add(row.ours)
    key = key.replace("sync.outer.", "optimizer.", 1)
    return tuple(name for name, keys in ours.items() if keys == {key} and "_" in name and key.split(".")[-1] != name)


def rows_at(key: str, value: Any) -> list[Counterpart]:
    """Return the rows of a key of another project; for a section (a mapping), those of the keys in it.

    Of equal rows of several projects it returns the first.
    """
    written = [_written(each) for each in _keys_in(key, value)]
    found = {(_written(row.theirs), row.ours): row for row in reversed(counterparts())}
    return [row for row in counterparts() if row in found.values() and any(_stands_for(row, each) for each in written)]


def sentences(rows: list[Counterpart]) -> str:
    """Return rows as one sentence for a message; "" for none."""
    shown = "; ".join(row.sentence for row in rows[:MOST_SHOWN])
    more = f"; docs/migration.md has {len(rows) - MOST_SHOWN} more of these keys" if len(rows) > MOST_SHOWN else ""
    return f" {shown}{more}." if rows else ""


def _keys_in(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _keys_in(f"{key}.{name}", inner)
    else:
        yield key


def _stands_for(row: Counterpart, written: str) -> bool:
    """Return whether a row's key is the written one, or a section that has it.

    A key without a counterpart is found in any section, also with a prefix: `model.experts.moe_capacity_factor`.
    """
    pattern = _written(row.theirs).replace("<name>", "*")
    if not row.ours and "_" in pattern and written.endswith(pattern):
        return True
    return fnmatchcase(written, pattern) or fnmatchcase(written, f"{pattern}.*")


def _written(key: str) -> str:
    return key.lower().replace("-", "_")


CLOSE = 0.8  # minimum similarity (difflib's ratio) of a mistyped name and the right one
SPECIFIC = 6  # letters of a name of two words that means the same in every section: `seq_len`, unlike `top_k`
MOST = 2  # suggestions; more of them say nothing


@cache
def known_entries(root: type) -> dict[str, Entry]:
    """Return every key of a configuration; if several choices have a key, the entry of the first one.

    Its aliases have the key's names in other projects, unless a key beside it has such an alias of its own.
    """
    found: dict[str, Entry] = {}
    for entry in entries(root):
        found.setdefault(entry.key, entry)
    own = {join(_parent(key), alias) for key, entry in found.items() for alias in entry.aliases}
    for key, entry in found.items():
        others = (name for name in names_of(key) if join(_parent(key), name) not in own)
        found[key] = replace(entry, aliases=(*entry.aliases, *others))
    return found


def is_known(known: Mapping[str, Entry], key: str) -> bool:
    """Return whether a key or a section is known."""
    return key in known or any(other.startswith(f"{key}.") for other in known)


def suggestions(key: str, kind: Any, known: Mapping[str, Entry]) -> list[str]:
    """Return likely corrections of `key`, which a section of the class `kind` lacks.

    They are keys of the section with this alias, else those with a similar name, and keys below it. Another section's
    key needs this alias, or this name of several words, because a short name means something else in each section.

    - `known`: all keys of the configuration
    """
    section, _, name = key.rpartition(".")
    written = name.lower().replace("-", "_")
    own = {alias: each.name for each in fields(kind) for alias in (each.name, *each.metadata.get("aliases", ()))}
    every = dict.fromkeys([*known, *map(_parent, known)])  # keys and sections
    inside = {each: each[len(section) :].lstrip(".") for each in every if not section or each.startswith(f"{section}.")}
    aliased = [each for each, entry in known.items() if {written, key} & {*entry.aliases}]
    found = (
        [each for each in aliased if section and key in known[each].aliases]
        or [each for each in aliased if _parent(section_of(each)) == section]
        or [join(section, name) for alias, name in own.items() if alias == written]
    )
    if not found:
        lower = [each for each in inside if written in (inside[each].partition(".")[2], inside[each].replace(".", "_"))]
        lower = _shortest([each for each in aliased if each in inside]) + (lower if len(lower) == 1 else [])
        near = get_close_matches(written, own, n=1, cutoff=CLOSE)
        found = [join(section, own[each]) for each in near] + lower
    if not found and "_" in written and len(written) >= SPECIFIC:
        distant, first = (
            [*aliased, *(each for each in every if each.endswith(f".{written}"))],
            section.partition(".")[0],
        )
        found = _shortest([each for each in distant if each.startswith(f"{first}.")] or distant)
    found = [re.sub(r"\.(<name>|0)\.type$", "", each) for each in found]
    return list(dict.fromkeys(found)) if len(found) <= MOST else []


def section_of(key: str) -> str:
    """Return the section of a key that is its type, which has the section's aliases too; another key as it is."""
    return re.sub(r"(\.<name>|\.0)?\.type$", "", key)


def _shortest(keys: list[str]) -> list[str]:
    fewest = min((key.count(".") for key in keys), default=0)
    return [key for key in keys if key.count(".") == fewest]


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def field_names(kind: Any) -> set[str]:
    return {each.name for each in fields(kind)}


COMMAND_LINE, KEYWORD = "on the command line", "as a keyword"  # origins of keys outside of a file
_ZEROS_FIRST = re.compile(r"[-+]?0[0-9_]+")


class Text(str):
    """A text from the command line or of a keyword; the type of its key determines its meaning."""


@dataclass(frozen=True)
class Decoder:
    """A decoder for the values of one configuration.

    - `root`: the configuration class, for suggestions of similar keys
    - `origins`: dotted key -> origin ("run.yaml, line 3"), for messages
    - `read_text`: reads a text that is given outside of a file as YAML; its second argument names it for messages
    """

    root: type
    origins: Mapping[str, str]
    read_text: Callable[[str, str], Any]

    def decode(self, kind: Any, raw: Any, key: str = "", default: Any = REQUIRED) -> Any:
        """Decode `raw` as a value of type `kind`; absent fields of a dataclass come from `default`.

        Raises `UserError` with every mistake, which names the dotted key, the value and the valid values.
        """
        origin = get_origin(kind)
        if kind is Any:
            return self._read(raw, key)
        if is_union(kind):
            return self._union(kind, raw, key, default)
        if is_dataclass(kind) or origin is dict:
            raw = self._read(raw, key)
            if not isinstance(raw, dict):
                raise self._wrong(kind, raw, key)
            if is_dataclass(kind):
                return self._dataclass(kind, dict(raw), key, default)
            return self._parts(key, ((name, get_args(kind)[1], value, REQUIRED) for name, value in raw.items()))
        if origin in (list, tuple):
            items = enumerate(self._items(kind, raw, key))
            return origin(self._parts(key, ((i, item, value, REQUIRED) for i, (item, value) in items)).values())
        return self._scalar(kind, raw, key)

    def _parts(self, key: str, parts: Iterable[tuple], owner: Any = None, found: Iterable[str] = ()) -> dict:
        """Decode parts (name, type, raw value, default) of a class `owner`; raise all mistakes, also those `found`."""
        values, mistakes = {}, list(found)
        for name, kind, raw, default in parts:
            try:
                values[name] = self.decode(kind, raw, join(key, name), default)
            except UserError as error:
                mistakes += map(str, error.found if isinstance(error, Mistakes) else [error])
        if owner is not None:
            mistakes += [self._invalid(key, error) for error in invalid_values(owner, values)]
        if mistakes:
            raise Mistakes(mistakes)
        return values

    def _dataclass(self, kind: Any, given: dict, key: str, default: Any) -> Any:
        choice, names = None, set(given)
        if is_registry(kind):
            choice, kind = self._choose(kind, given, key, default)
        hints, base = types_of(kind), default if type(default) is kind else REQUIRED
        defaults = {each.name: default_of(each, base) for each in fields(kind)}
        mistakes = self._unknown(kind, choice, given, key)
        for each in fields(kind):
            inner = join(key, each.name)
            is_missing = each.name not in given and defaults[each.name] is REQUIRED
            if is_missing and not any(f"`{inner}`" in mistake for mistake in mistakes):
                meaning = f" ({each.metadata['help']})" if "help" in each.metadata else ""
                ways = f"Give it in the YAML file, or as `--{inner} VALUE`; its type is {type_name(hints[each.name])}."
                mistakes.append(f"`{inner}`{meaning} is missing: it has no default. {ways}")
        parts = ((name, hints[name], value, defaults[name]) for name, value in given.items() if name in defaults)
        values = self._parts(key, parts, kind, mistakes)
        try:
            decoded = kind(**values) if base is REQUIRED else replace(base, **values)
        except (KeyedError, Mistakes) as error:
            every = error.found if isinstance(error, Mistakes) else [error]
            raise Mistakes([self._invalid(key, each) for each in every]) from None
        if isinstance(decoded, Settings):
            object.__setattr__(decoded, "left_out", frozenset({TYPE, *defaults} - names))  # it is frozen
        return decoded

    def _invalid(self, key: str, error: str | KeyedError) -> str:
        if isinstance(error, str):
            return error
        wrong = join(key, error.key)
        return f"{wrong} {error.found}{self._at(wrong)}{error.rest}"

    def _choose(self, registry: Any, given: dict, key: str, default: Any) -> tuple[str, Any]:
        """Return the name and the class of a registry's choice, and remove the name from the `given` keys."""
        known, names = choices(registry), ", ".join(choices(registry))
        if TYPE not in given:
            name = choice_name(registry, default)
            if name is None:
                beside = next((each for each in self.origins if each.startswith(f"{key}.")), key)  # a key that is given
                raise UserError(f"`{join(key, TYPE)}` is missing{self._at(beside)}; valid choices: {names}.")
            return name, known[name]
        name = given.pop(TYPE)
        if not isinstance(name, str) or name not in known:
            try:
                registry.get_choice_class(str(name))
            except KeyedError as error:  # it has a reason
                raise Mistakes([self._invalid(key, error)]) from None
            except KeyError:
                pass
            found = f"`{join(key, TYPE)}` is {_show(name)}{self._at(join(key, TYPE))}, which"
            near = did_you_mean(get_close_matches(str(name), known))
            own = " One of your own needs its module in `plugins`." if "plugins" in field_names(self.root) else ""
            raise UserError(f"{found} is not a known choice.{near} Valid choices: {names}.{'' if near else own}")
        return name, known[name]

    def _unknown(self, kind: Any, choice: str | None, given: Mapping[str, Any], key: str) -> list[str]:
        """Return the mistakes of the keys that a class lacks; `choice` is its name if a registry has it."""
        names = field_names(kind)
        of = (f"under `{key}`" if key else "at the top") + (f" with {TYPE} {choice}" if choice else "")
        valid = f" Valid keys {of}: {', '.join(sorted([*names, TYPE] if choice else names))}."
        unknown = {join(key, name): name for name in given if name not in names}
        hints = {inner: self._hint(inner, name, kind, given[name]) for inner, name in unknown.items()}
        unclear = [inner for inner, hint in hints.items() if not hint]
        hints |= dict.fromkeys(unclear[-1:], valid)  # once
        return [f"`{inner}`{self._at(inner)} is not a valid key {of}.{hint}" for inner, hint in hints.items()]

    def _hint(self, key: str, name: str, kind: Any, value: Any) -> str:
        if "." in name and key in known_entries(self.root):
            *above, last = name.split(".")
            nested = "".join(f"{level}: {{" for level in above) + f"{last}: {_show(value)}" + "}" * len(above)
            return f" Dots are for the command line (`--{key}`); in YAML one level lies in another: `{nested}`."
        if text := _owners(kind, name):
            return text
        known = known_entries(self.root)
        rows = [row for row in rows_at(key, value) if not row.ours or is_known(known, row.ours)]
        if rows and isinstance(value, dict):
            return sentences(rows)
        near = [section_of(each) if isinstance(value, dict) else each for each in suggestions(key, kind, known)]
        rows = [row for row in rows if row.note or row.ours not in near]
        meant = did_you_mean(each for each in near if each not in [row.ours for row in rows])
        return sentences(rows) + meant + "".join(_owners(kind, each.removeprefix(key[: -len(name)])) for each in near)

    def _items(self, kind: Any, raw: Any, key: str) -> list[tuple[Any, Any]]:
        """Return (type, value) of every element of a list; on the command line `1,2` is also a list."""
        if isinstance(raw, Text):
            as_yaml = raw.startswith(("[", "{"))
            parts = [Text(part.strip()) for part in raw.split(",") if part.strip()]
            raw = self._read(raw, key) if as_yaml else parts or [raw] * bool(raw)  # a line break is also a text
        arguments = get_args(kind)
        if isinstance(raw, dict) and raw and is_dataclass(arguments[0]):
            one = shortened(", ".join(f"{name}: {_show(value)}" for name, value in raw.items()))
            raise UserError(
                f"`{key}`{self._at(key)} is one mapping; expected {type_name(kind)}: "
                f"`{key.rpartition('.')[2]}: [{{{one}}}]`."
            )
        has_any_length = get_origin(kind) is list or arguments[-1] is Ellipsis
        if not isinstance(raw, list) or not (has_any_length or len(raw) == len(arguments)):
            raise self._wrong(kind, raw, key)
        return [(arguments[0], value) for value in raw] if has_any_length else list(zip(arguments, raw, strict=True))

    def _union(self, kind: Any, raw: Any, key: str, default: Any) -> Any:
        members = [member for member in get_args(kind) if member is not type(None)]
        if len(members) < len(get_args(kind)) and (raw is None or (isinstance(raw, Text) and raw in ("null", "~"))):
            return None
        if isinstance(raw, dict) and any(map(is_dataclass, members)):  # whose message names the key below
            members = [member for member in members if is_dataclass(member)]
        if len(members) == 1:
            return self.decode(members[0], raw, key, default)
        for member in members:
            try:
                return self.decode(member, raw, key, default)
            except UserError:
                continue
        raise self._wrong(kind, raw, key)

    def _scalar(self, kind: Any, raw: Any, key: str) -> Any:
        value = str(raw) if kind in (str, Path) and isinstance(raw, Text) else self._read(raw, key)
        if kind in (str, Path) and isinstance(value, str):
            self._check_text(kind, value, key)
            return kind(value)
        if kind is bool and isinstance(value, bool):
            return value
        # Text like an octal number, but with an 8 or a 9; and digits of other scripts, which Python reads too.
        if isinstance(value, str) and (_ZEROS_FIRST.fullmatch(value) or not value.isascii()):
            raise self._wrong(kind, value, key)
        if kind in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
            # YAML 1.1 reads 1e-3 as a string.
            try:
                number = float(value) if kind is float or not isinstance(value, int) else value
            except (ValueError, OverflowError):
                raise self._wrong(kind, value, key) from None
            if kind is float or number == number // 1:
                return kind(number)
        raise self._wrong(kind, value, key)

    def _check_text(self, kind: type, text: str, key: str) -> None:
        if kind is Path and "\0" in text:
            raise UserError(f"`{key}`{self._at(key)} is {shown(text)}: no path has a character of code 0.")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"`{key}`{self._at(key)} is {shortened(text)!a}: half of a surrogate pair is no character.")

    def _read(self, raw: Any, key: str) -> Any:
        return self.read_text(raw, f"`{key}`{self._at(key)}") if isinstance(raw, Text) else raw

    def _wrong(self, kind: Any, raw: Any, key: str) -> UserError:
        found = f"`{key}`{self._at(key)}"
        entry = known_entries(self.root).get(key)
        meaning = f" ({entry.help})" if entry and entry.help else ""
        if isinstance(raw, dict) and raw:
            below = ", ".join(f"`{join(key, name)}`" for name in raw)
            return UserError(
                f"{found} is of type {type_name(kind)}{meaning}: nothing lies below it, but {below} was given."
            )
        advice = ""
        if is_registry(kind):
            advice = f"; choose with `{join(key, TYPE)}`: {', '.join(choices(kind))}"
        elif is_dataclass(kind):
            advice = f" with the keys {', '.join(sorted(field_names(kind)))}"
        elif kind in (str, Path) and raw is not None and not isinstance(raw, list):
            advice = f"; in quotes, '{_show(raw)}', it would be one"
        return UserError(f"{found} is {_describe(raw)}; expected {type_name(kind)}{meaning}{advice}.")

    def _at(self, key: str) -> str:
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return f" ({self.origins[key]})" if key else ""


def _owners(kind: Any, name: str) -> str:
    """Return a sentence with the choices that have a key which the choice `kind` lacks; "" if there is none."""
    known = kind.get_known_choices() if is_registry(kind) and name not in field_names(kind) else {}
    others = [other for other, choice in known.items() if name in field_names(choice)]
    return f" `{name}` belongs to {TYPE} {' or '.join(others)}." if others else ""


def _show(raw: Any) -> str:
    if isinstance(raw, bool) or raw is None:
        return {True: "true", False: "false", None: "null"}[raw]
    return shown(raw) if isinstance(raw, int | float | str) else shortened(str(raw))


def _describe(raw: Any) -> str:
    """Format a value with its type: `'many', a str`."""
    if raw is None:
        return "null (nothing was given)"
    if isinstance(raw, dict):
        return "an empty mapping"
    if isinstance(raw, list):
        some = ", ".join(_show(item) for item in raw[:10]) + (", ..." if len(raw) > 10 else "")
        return f"[{some}], a list of {len(raw)}"
    names = {str: "a str", Text: "a str", bool: "a bool", int: "an int", float: "a float"}
    return f"{_show(raw)}, {names.get(type(raw), f'a {type(raw).__name__}')}"
