"""A decoder from plain mappings, lists and scalars to configuration dataclasses, with errors that name key and origin.

It collects the mistakes of all keys (unknown, missing, of a wrong type, out of range) and raises them as one error.
draccus provides the registries of choices and the encoding. This module has its own decoder, because that of draccus
reports class names and hides the errors of configuration classes.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from gregale.errors import KeyedError, Mistakes, UserError
from gregale.settings import Settings, did_you_mean, invalid_values, shortened, shown
from gregale.settings.config_schema import (
    REQUIRED,
    TYPE,
    choice_name,
    choices,
    default_of,
    is_registry,
    is_union,
    join,
    type_name,
    types_of,
)
from gregale.settings.other_projects import rows_at, sentences
from gregale.settings.suggestions import field_names, is_known, known_entries, section_of, suggestions

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
                mistakes += error.found if isinstance(error, Mistakes) else [str(error)]
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
        except KeyedError as error:
            raise Mistakes([self._invalid(key, error)]) from None
        if isinstance(decoded, Settings):
            object.__setattr__(decoded, "left_out", frozenset({TYPE, *defaults} - names))  # it is frozen
        return decoded

    def _invalid(self, key: str, error: KeyedError) -> str:
        wrong = join(key, error.key)
        return f"{wrong} {error.found}{self._at(wrong)}{error.rest}"

    def _choose(self, registry: Any, given: dict, key: str, default: Any) -> tuple[str, Any]:
        """Return the name and the class of a registry's choice, and remove the name from the `given` keys."""
        known, names = choices(registry), ", ".join(choices(registry))
        if TYPE not in given:
            name = choice_name(registry, default)
            if name is None:
                raise UserError(f"`{join(key, TYPE)}` is missing{self._at(key)}; valid choices: {names}.")
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
