"""A decoder from plain mappings, lists and scalars to configuration dataclasses, with errors that name key and origin.

draccus provides the registries of choices and the encoding. This module has its own decoder, because that of draccus
reports class names and hides the errors of configuration classes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args, get_origin

from gregale.errors import KeyedError, UserError
from gregale.settings import did_you_mean, shortened, shown
from gregale.settings.config_schema import (
    REQUIRED,
    TYPE,
    Entry,
    choice_name,
    choices,
    default_of,
    entries,
    is_registry,
    is_union,
    join,
    type_name,
    types_of,
)
from gregale.settings.other_projects import names_of, rows_at, sentences

COMMAND_LINE, KEYWORD = "on the command line", "as a keyword"  # origins of keys outside of a file
_ZEROS_FIRST = re.compile(r"[-+]?0[0-9_]+")
CLOSE = 0.72  # minimum similarity (difflib's ratio) of a mistyped name and a suggestion


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

        Raises `UserError` that names the dotted key, the value and the valid values.
        """
        origin = get_origin(kind)
        if kind is Any:
            return self._read(raw, key)
        if is_union(kind):
            return self._union(kind, raw, key, default)
        if is_dataclass(kind):
            return self._dataclass(kind, self._read(raw, key), key, default)
        if origin is dict:
            return self._mapping(kind, self._read(raw, key), key)
        if origin in (list, tuple):
            items = self._items(kind, raw, key)
            return origin(self.decode(item, value, join(key, i)) for i, (item, value) in enumerate(items))
        return self._scalar(kind, raw, key)

    def _dataclass(self, kind: Any, raw: Any, key: str, default: Any) -> Any:
        if not isinstance(raw, dict):
            raise self._wrong(kind, raw, key)
        given = dict(raw)
        if is_registry(kind):
            kind = self._choose(kind, given, key, default)
        self._check_known(kind, given, key)
        hints = types_of(kind)
        base = default if type(default) is kind else REQUIRED
        values = {}
        for each in fields(kind):
            inner, fallback = join(key, each.name), default_of(each, base)
            if each.name in given:
                values[each.name] = self.decode(hints[each.name], given[each.name], inner, fallback)
            elif fallback is REQUIRED:
                meaning = f" ({each.metadata['help']})" if "help" in each.metadata else ""
                raise UserError(
                    f"`{inner}`{meaning} is missing: it has no default. Give it in the YAML file, or as "
                    f"`--{inner} VALUE`; its type is {type_name(hints[each.name])}."
                )
        try:
            return kind(**values) if base is REQUIRED else replace(base, **values)
        except KeyedError as error:
            wrong = join(key, error.key)
            raise UserError(f"{wrong} {error.found}{self._at(wrong)}{error.rest}") from None

    def _choose(self, registry: Any, given: dict, key: str, default: Any) -> Any:
        known, names = choices(registry), ", ".join(choices(registry))
        if TYPE not in given:
            name = choice_name(registry, default)
            if name is None:
                raise UserError(f"`{join(key, TYPE)}` is missing{self._at(key)}; valid choices: {names}.")
            return known[name]
        name = given.pop(TYPE)
        if not isinstance(name, str) or name not in known:
            found = f"`{join(key, TYPE)}` is {_show(name)}{self._at(join(key, TYPE))}, which"
            near = did_you_mean(get_close_matches(str(name), known))
            own = " One of your own needs its module in `plugins`." if "plugins" in _field_names(self.root) else ""
            raise UserError(f"{found} is not a known choice.{near} Valid choices: {names}.{'' if near else own}")
        return known[name]

    def _check_known(self, kind: Any, given: Mapping[str, Any], key: str) -> None:
        valid = [each.name for each in fields(kind)]
        unknown = [name for name in given if name not in valid]
        if not unknown:
            return
        named = ", ".join(f"`{join(key, name)}`" for name in unknown)
        origins = dict.fromkeys(self._at(join(key, name)) for name in unknown)
        at, of = "".join(origins), f"under `{key}`" if key else "at the top"
        if is_registry(kind):
            of += f" with {TYPE} {choice_name(kind)}"
            valid.append(TYPE)
        verb = "is not a valid key" if len(unknown) == 1 else "are not valid keys"
        hints = "".join(self._hint(join(key, name), name, kind, given[name]) for name in unknown)
        raise UserError(f"{named}{at} {verb} {of}.{hints} Valid keys {of}: {', '.join(sorted(valid))}.")

    def _hint(self, key: str, name: str, kind: Any, value: Any) -> str:
        if "." in name and key in known_entries(self.root):
            *above, last = name.split(".")
            nested = "".join(f"{level}: {{" for level in above) + f"{last}: {_show(value)}" + "}" * len(above)
            return f" Dots are for the command line (`--{key}`); in YAML one level lies in another: `{nested}`."
        if is_registry(kind):
            others = [other for other, choice in kind.get_known_choices().items() if name in _field_names(choice)]
            if others:
                return f" `{name}` belongs to {TYPE} {' or '.join(others)}."
        known = known_entries(self.root)
        rows = [row for row in rows_at(key, value) if not row.ours or _has(known, row.ours)]
        if rows and isinstance(value, dict):
            return sentences(rows)
        beside = [join(key.rpartition(".")[0], each.name) for each in fields(kind)]  # includes groups of keys
        near = suggestions(key, beside, known)
        rows = [row for row in rows if row.note or row.ours not in near]
        return sentences(rows) + did_you_mean(each for each in near if each not in [row.ours for row in rows])

    def _mapping(self, kind: Any, raw: Any, key: str) -> dict:
        if not isinstance(raw, dict):
            raise self._wrong(kind, raw, key)
        return {name: self.decode(get_args(kind)[1], value, join(key, name)) for name, value in raw.items()}

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
                f"`{key}`{self._at(key)} is one mapping; expected {type_name(kind)}: `{_last(key)}: [{{{one}}}]`."
            )
        if not isinstance(raw, list):
            raise self._wrong(kind, raw, key)
        if get_origin(kind) is list or arguments[-1] is Ellipsis:
            return [(arguments[0], value) for value in raw]
        if len(raw) != len(arguments):
            raise self._wrong(kind, raw, key)
        return list(zip(arguments, raw, strict=True))

    def _union(self, kind: Any, raw: Any, key: str, default: Any) -> Any:
        members = [member for member in get_args(kind) if member is not type(None)]
        if len(members) < len(get_args(kind)) and (raw is None or (isinstance(raw, Text) and raw in ("null", "~"))):
            return None
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
            advice = f" with the keys {', '.join(sorted(_field_names(kind)))}"
        elif kind in (str, Path) and raw is not None and not isinstance(raw, list):
            advice = f"; in quotes, '{_show(raw)}', it would be one"
        return UserError(f"{found} is {_describe(raw)}; expected {type_name(kind)}{meaning}{advice}.")

    def _at(self, key: str) -> str:
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return f" ({self.origins[key]})" if key else ""


@cache
def known_entries(root: type) -> dict[str, Entry]:
    """Return every key of a configuration; if several choices have a key, the entry of the first one.

    Its aliases have the key's names in other projects, unless a key beside it has such an alias of its own.
    """
    found: dict[str, Entry] = {}
    for entry in entries(root):
        found.setdefault(entry.key, entry)
    own = {join(key.rpartition(".")[0], alias) for key, entry in found.items() for alias in entry.aliases}
    for key, entry in found.items():
        others = (name for name in names_of(key) if join(key.rpartition(".")[0], name) not in own)
        found[key] = replace(entry, aliases=(*entry.aliases, *others))
    return found


def _has(known: Mapping[str, Entry], key: str) -> bool:
    """Return whether a key or a section is known."""
    return key in known or any(other.startswith(f"{key}.") for other in known)


def suggestions(key: str, beside: list[str], known: Mapping[str, Entry]) -> list[str]:
    """Return likely corrections of `key`: keys with this alias, the same name in other sections, similar names.

    - `beside`: the valid keys of the same section
    - `known`: all keys of the configuration
    """
    above, _, name = key.rpartition(".")
    written = name.lower().replace("-", "_")
    groups = [other.rpartition(".")[0] for other in known]
    candidates = dict.fromkeys([*beside, *known, *groups])
    meant = [other for other, entry in known.items() if written in entry.aliases]
    same = [other for other in candidates if _last(other) == written]
    if not meant and not same:
        near = get_close_matches(written, {_last(other) for other in beside}, cutoff=CLOSE)
        meant = [join(above, name) for name in near]
    if not meant and not same:
        near = get_close_matches(written, {_last(other) for other in candidates}, n=1, cutoff=CLOSE)
        meant = [other for other in candidates if _last(other) in near]
    shared = {other: _shared_levels(other, above) for other in [*meant, *same]}
    nearest = [[other for other in found if shared[other] == max(shared.values())] for found in (meant, same)]
    shortest = [[key for key in found if key.count(".") == min(each.count(".") for each in found)] for found in nearest]
    return list(dict.fromkeys(shortest[0] + shortest[1]))[:3]


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _shared_levels(key: str, other: str) -> int:
    pairs = zip(key.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _field_names(kind: Any) -> set[str]:
    return {each.name for each in fields(kind)}


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
