"""The packing of JSON values of peers, and the check by which they become the protocol's types, or are rejected.

The headers of a view have most values in common, so a view has them in columns: for each key the different values, and
for each header the index of its value. Each value is then sent and checked once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

NO_ROUND = -1
MESSAGES = 2  # the version of the messages between islands and coordinator
_hints = cache(get_type_hints)


class GarbageError(ValueError):
    """A header or record of a peer does not have the format of this version."""


Column = tuple[list[Any], list[int | None]]
"""Different values, and for each object the index of its value (None: it lacks the key); without indices all have the
only value."""


class Packed(NamedTuple):
    """JSON objects as columns by key."""

    count: int
    columns: Mapping[str, Column]

    def unpacked(self, number: int) -> dict[str, Any]:
        places = ((key, values, indices[number] if indices else 0) for key, (values, indices) in self.columns.items())
        return {key: values[place] for key, values, place in places if place is not None}


def pack(objects: Sequence[Mapping[str, Any]]) -> Packed:
    """Return JSON objects as columns."""
    columns: dict[str, Column] = {}
    for key in dict.fromkeys(key for each in objects for key in each):
        places: dict[Any, int] = {}
        values, indices = columns[key] = [], []
        for each in objects:
            if key not in each:
                indices.append(None)
                continue
            value = each[key]
            mark = json.dumps(value) if isinstance(value, list | tuple | dict) else (type(value), value)
            indices.append(places.setdefault(mark, len(values)))
            if len(places) > len(values):
                values.append(value)
        if indices.count(0) == len(objects):
            indices.clear()
    return Packed(len(objects), columns)


def decode(kind: Any, value: object, what: str) -> Any:
    """Return the dataclass `kind` from a JSON object with its fields; raise `GarbageError`, which names `what`.

    Named tuples are JSON lists. Numbers are not negative, except that `round` may be `NO_ROUND`.
    """
    [found] = decode_all(kind, pack([value if isinstance(value, dict) else {}]), what)
    if isinstance(found, GarbageError):
        raise found
    return found


def decode_all(kind: Any, packed: Packed, what: str) -> list[Any]:
    """Return each packed object as `decode` does, or the `GarbageError` that rejects it."""
    hints, columns = _hints(kind), []
    other_fields = GarbageError(f"a {what} does not have the fields of this version of Gregale")
    for name in {**hints, **packed.columns}:
        values, indices = packed.columns.get(name, ([], [None] * packed.count))
        decoded = [_checked(hints[name], each, name, what) if name in hints else other_fields for each in values]
        absent = other_fields if name in hints else None
        columns.append([absent if place is None else decoded[place] for place in indices or [0] * packed.count])
    rows = zip(*columns, strict=True)
    return [next((x for x in row if isinstance(x, GarbageError)), None) or kind(*row[: len(hints)]) for row in rows]


def _checked(kind: Any, value: Any, name: str, what: str) -> Any:
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
