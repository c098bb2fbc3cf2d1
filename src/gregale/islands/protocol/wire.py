"""The packing of JSON values of peers, and the check by which they become the protocol's types, or are rejected.

A header travels as texts: the JSON of each value. The coordinator neither reads nor writes these texts. The headers of
a view have most values in common. So a view has columns: for each key the different values, and for each header the
index of its value. Each value is sent and checked once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

NO_ROUND = -1
Columns = Mapping[str, tuple[list[Any], list[int]]]
INVALID = ...  # in place of a value whose text is not JSON
_hints = cache(get_type_hints)


class GarbageError(ValueError):
    """A header or record of a peer does not have the format of this version."""


def to_texts(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the JSON text of each value of a header."""
    return {key: json.dumps(value, separators=(",", ":"), allow_nan=False) for key, value in header.items()}


def pack(headers: Sequence[Mapping[str, str]]) -> Columns:
    """Return headers of texts as columns; an absent key counts as null."""
    columns = {}
    for key in dict.fromkeys(key for each in headers for key in each):
        texts = [each.get(key, "null") for each in headers]
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        columns[key] = list(places), [places[text] for text in texts]
    return columns


def read_texts(columns: Columns) -> Columns:
    """Return the columns with the values of their texts."""
    return {key: ([_read(text) for text in texts], places) for key, (texts, places) in columns.items()}


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return INVALID


def unpack(columns: Columns, key: str) -> list[Any]:
    """Return the value of a key in each object."""
    values, places = columns[key]
    return [values[place] for place in places]


def decode_all(kind: Any, columns: Columns, what: str) -> list[Any]:
    """Return each packed object as `decode` does, or its `GarbageError`; ignore other keys."""
    fields = []
    for name, hint in _hints(kind).items():
        values, places = columns[name]
        checked = [_checked(hint, each, name, what) for each in values]
        fields.append([checked[place] for place in places])
    rows = zip(*fields, strict=True)
    return [next((each for each in row if isinstance(each, GarbageError)), None) or kind(*row) for row in rows]


def decode(kind: Any, value: object, what: str) -> Any:
    """Return the dataclass `kind` from a JSON object with its fields; raise `GarbageError`, which names `what`.

    Named tuples are JSON lists. Numbers are not negative, except that `round` may be `NO_ROUND`.
    """
    hints = _hints(kind)
    if not isinstance(value, dict) or value.keys() != hints.keys():
        raise GarbageError(f"a {what} does not have the fields of this version of Gregale")
    [found] = decode_all(kind, {name: ([each], [0]) for name, each in value.items()}, what)
    if isinstance(found, GarbageError):
        raise found
    return found


def _checked(kind: Any, value: Any, name: str, what: str) -> Any:
    """Return a field's value as type `kind`, or the `GarbageError` that rejects it."""
    try:
        return _value(kind, value, name)
    except TypeError:
        return GarbageError(f"a {what} has no usable {name!r}")
    except GarbageError as error:
        return error


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
