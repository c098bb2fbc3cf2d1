"""Provides the read of JSON objects that other programs wrote; a value of another type than its key's is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from gregale.errors import UserError
from gregale.settings import Range, shortened
from gregale.settings.decoding import is_union, type_name


@dataclass(frozen=True)
class TypedJson:
    """An object of a JSON file.

    - `source`: its path and, of an object in another, its key
    - `defaults`: values of keys that it lacks, or that are null though values of their type are not
    """

    content: Mapping[str, Any]
    source: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def read(self, key: str, kind: Any, default: Any = ..., valid: Range | None = None) -> Any:
        """Return a key's value as a field of type `kind` has it; without any default the key has to be there."""
        value, default = self.content.get(key), self.defaults.get(key, default)
        if default is not ... and (key not in self.content or (value is None and _typed(None, kind) is ...)):
            return default
        found = _typed(value, kind)
        if found is ... or (valid and found is not None and found not in valid):
            there = f"is {shortened(repr(value))}" if key in self.content else "is missing"
            wanted = f"{type_name(kind)}{f', {valid.words(largest=True)}' if valid else ''}"
            raise self.error(f"{key} {there}; it has to be of type {wanted}.")
        return found

    def below(self, key: str) -> "TypedJson":
        """Return the object at a key; an empty one if it is absent or null."""
        return TypedJson(self.read(key, dict, {}), f"{self.source}, {key}")

    def error(self, text: str) -> UserError:
        return UserError(f"{self.source}: {text}")


def _typed(value: Any, kind: Any) -> Any:
    """Return a value as a type has it; an ellipsis if it is of another type.

    A whole number may be written as a float, and a float as a whole number.
    """
    if is_union(kind):
        return next((found for each in get_args(kind) if (found := _typed(value, each)) is not ...), ...)
    if get_origin(kind) is list and isinstance(value, list):
        items = [_typed(item, get_args(kind)[0]) for item in value]
        return ... if ... in items else items
    if kind is float and type(value) in (int, float):
        return float(value) if abs(value) < 2**1023 else ...  # neither infinity nor NaN
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    return value if type(value) is kind else ...
