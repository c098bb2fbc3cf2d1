"""The check of JSON values from peers and checkpoints: they become the protocol's types, or are rejected."""

from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

NO_ROUND = -1
_hints = cache(get_type_hints)


class GarbageError(ValueError):
    """A header or record of a peer does not have the format of this version."""


def decode(kind: Any, value: object, what: str) -> Any:
    """Return the dataclass `kind` from a JSON object with its fields; raise `GarbageError`, which names `what`.

    Named tuples are JSON lists. Numbers are not negative, except that `round` may be `NO_ROUND`.
    """
    hints = _hints(kind)
    if not isinstance(value, dict) or value.keys() != hints.keys():
        raise GarbageError(f"a {what} does not have the fields of this version of Gregale")
    found = {}
    for name, hint in hints.items():
        try:
            found[name] = _value(hint, value[name], name)
        except TypeError:
            raise GarbageError(f"a {what} has no usable {name!r}") from None
    return kind(**found)


def _value(kind: Any, value: Any, name: str) -> Any:
    """Return a field's value as type `kind`. Raises TypeError, and `GarbageError` for a part that is a dataclass."""
    arguments = get_args(kind)
    if isinstance(kind, UnionType):
        return None if value is None else _value(arguments[0], value, name)
    if is_dataclass(kind):
        return decode(kind, value, name)
    if type(value) in (list, tuple):
        if fields := getattr(kind, "_fields", None):
            return kind(*_values(list(_hints(kind).values()), value, fields))
        if get_origin(kind) is tuple:
            kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
            return tuple(_values(kinds, value, [name] * len(kinds)))
    if kind is float:
        if type(value) in (int, float) and 0 <= value < float("inf"):
            return float(value)
        raise TypeError
    if type(value) is not kind or (kind is int and value < (NO_ROUND if name == "round" else 0)):
        raise TypeError
    return value


def _values(kinds: Any, values: Any, names: Any) -> list[Any]:
    if not len(kinds) == len(values) == len(names):
        raise TypeError
    return [_value(*each) for each in zip(kinds, values, names, strict=True)]
