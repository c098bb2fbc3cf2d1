"""The base class of configuration classes, and the metadata of their fields, which this package reads.

`setting` makes a dataclass field of a default, a help text and the metadata:

    learning_rate: float = setting(1e-3, "peak learning rate", range=at_least(0), aliases=("lr",))

- `range`: a `Range`; applies to each element of a list or a mapping, and to an optional number that is not None,
  and not to texts
- `choices`: the valid values of a text
- `unique`: whether the elements of a list have to differ
- `aliases`: names of the key in other programs, for suggestions
- `by_topic`: true for a key that the help has only with `--help TOPIC`
- `fixed`: a `Fixed`, if a run that resumes from a checkpoint may not change the value

A class that derives from `Settings` checks ranges and choices in its constructor, for YAML and Python alike. Help, docs
and error messages read the same metadata (`gregale.settings.decoding`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, NamedTuple

from gregale.errors import KeyedError
from gregale.formatting import format_setting
from gregale.streams import printable

# The device stores numbers as int32 and float32, where values below the smallest normal float are 0.
LARGEST_WHOLE = 2**31 - 1
LARGEST_FLOAT = 3.4e38
SMALLEST_FLOAT = 2.0**-126


@dataclass(frozen=True)
class Range:
    """The valid numbers: from `minimum` to `maximum`, and the numbers of `also`; never NaN or an infinity.

    - `above`, `below`: whether minimum and maximum themselves are excluded
    """

    minimum: float
    maximum: float
    above: bool = False
    below: bool = False
    also: tuple[float, ...] = ()

    def __contains__(self, number: float) -> bool:
        if number in self.also:
            return True
        size = 0 if abs(number) < SMALLEST_FLOAT else number  # comparisons with NaN are false
        over = size > self.minimum if self.above else size >= self.minimum
        return bool(over and (size < self.maximum if self.below else size <= self.maximum))

    def words(self, largest: bool = False) -> str:
        """Format the range as `at least 1`; `largest` includes a maximum that is only the limit of the number type."""
        span = f"from {_bound(self.minimum)} to {_bound(self.maximum)}"
        over = f"{'above' if self.above else 'at least'} {_bound(self.minimum)}"
        under = f"{'below' if self.below else 'at most'} {_bound(self.maximum)}"
        return self._format(over, under, span, " and ", largest)

    def signs(self) -> str:
        """Format the range as `>= 1`, for tables."""
        span = f"{_bound(self.minimum)} to {_bound(self.maximum)}"
        over = f"{'>' if self.above else '>='} {_bound(self.minimum)}"
        under = f"{'<' if self.below else '<='} {_bound(self.maximum)}"
        return self._format(over, under, span, ", ", largest=False)

    def _format(self, over: str, under: str, span: str, joint: str, largest: bool) -> str:
        is_bound = largest or self.maximum not in (LARGEST_WHOLE, LARGEST_FLOAT)
        both = f"{over}{joint}{under}" if self.above or self.below else span
        return (both if is_bound else over) + "".join(f" or {_bound(number)}" for number in self.also)


def whole(minimum: int, maximum: int = LARGEST_WHOLE, also: tuple[int, ...] = ()) -> Range:
    return Range(minimum, maximum, also=also)


def at_least(minimum: float) -> Range:
    return Range(minimum, LARGEST_FLOAT)


def above(minimum: float) -> Range:
    return Range(minimum, LARGEST_FLOAT, above=True)


def between(minimum: float, maximum: float) -> Range:
    """Return the range with both limits included."""
    return Range(minimum, maximum)


DECAY = Range(0, 1, below=True)  # of a moving average: b in `b * old + (1 - b) * new`


@dataclass(frozen=True)
class Fixed:
    """A key that a run cannot change when it resumes from a checkpoint.

    - `why`: the effect of a change, for the message
    - `at`: if given, only changes from or to this value are forbidden
    """

    why: str
    at: Any = ...

    def forbids(self, before: Any, now: Any) -> bool:
        return before != now and (self.at is ... or self.at in (before, now))


class Settings:
    """A configuration dataclass that checks its fields against their metadata.

    - `left_out`: the keys that a file or a command line has given no value, and `type` if it has given none; nothing
      of an object that Python code has made
    - `incompatible`: rules between this section and other settings, see `gregale.settings.Rule`
    """

    left_out: ClassVar[frozenset[str]] = frozenset()
    incompatible: ClassVar[tuple[Any, ...]] = ()

    def __post_init__(self):
        check(self)


def check(settings: Any) -> None:
    """Raise `KeyedError` for the first value of a dataclass that is out of range, no valid choice, or there twice."""
    for error in invalid_values(type(settings), vars(settings)):
        raise error


def invalid_values(kind: Any, values: Mapping[str, Any]) -> Iterator[KeyedError]:
    """Yield an error for each of the values, by the names of a dataclass's fields, that the metadata do not allow."""
    for each in (each for each in fields(kind) if each.name in values):
        found = values[each.name]
        if each.metadata.get("unique") and len(set(found)) < len(found):
            twice = next(value for value in found if found.count(value) > 1)
            yield KeyedError(each.name, f"has {shown(twice)} twice", "; give each of its values once.")
        for key, value in _values(each.name, found):
            wanted = None if isinstance(value, str) else each.metadata.get("range")
            if wanted is not None and value not in wanted:
                _, _, null = str(each.metadata.get("help", "")).partition("null: ")  # what null means, if it is valid
                needed = wanted.words(largest=value > wanted.maximum) + (f", or null: {null}" if null else "")
                yield KeyedError(key, f"is {shown(value)}", f"; it has to be {needed}.")
            if (choices := each.metadata.get("choices")) is not None and value not in choices:
                named = each.metadata.get("elsewhere", {}).get(value)  # in other projects
                near = did_you_mean([named] if named else get_close_matches(str(value), choices))
                yield KeyedError(key, f"is {shown(value)}", f".{near} Valid choices: {', '.join(choices)}.")


def in_steps(length: float, steps: int) -> int:
    """Return a length in steps; below 1 it is a fraction of a run of `steps` steps."""
    return round(length * steps) if length < 1 else round(min(length, LARGEST_WHOLE))


def check_name(key: str, name: str) -> None:
    """Raise `KeyedError` for a name with control characters, or one that a command would read as an option."""
    if name.startswith("-"):
        raise KeyedError(key, f"is {shown(name)}", "; what begins with '-' is an option to every command.")
    if printable(name) != name:
        wrong = next(each for each in name if printable(each) != each)
        raise KeyedError(key, f"is {shown(name)}", f"; the character U+{ord(wrong):04X} in it controls terminals.")


def check_path(key: str, path: str) -> None:
    """Raise `KeyedError` for a text that is not a path of the operating system."""
    if not path:
        raise KeyedError(key, "is empty", "; give a folder or a file, `.` is the folder that you are in.")
    if "\0" in path:
        raise KeyedError(key, f"is {shown(path)}", ": no path has a character of code 0.")


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """Return a dataclass field with a default (`list` or `dict`: an empty one), a line of help and further metadata."""
    if default is list or default is dict:
        return field(default_factory=default, metadata={"help": help, **metadata})
    return field(default=default, metadata={"help": help, **metadata})


def restated(owner: Any, name: str, default: Any, help: str | None = None) -> Any:
    """Return a base class's field with another default for a subclass, and another help text if given."""
    (each,) = (each for each in fields(owner) if each.name == name)
    return field(default=default, metadata={**each.metadata, **({"help": help} if help else {})})


def did_you_mean(near: Iterable[str]) -> str:
    named = " or ".join(f"`{name}`" for name in near)
    return f" Did you mean {named}?" if named else ""


def _values(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the value with its key, or all its elements with their keys; skip None."""
    if isinstance(value, list | tuple | dict):
        for name, element in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _values(f"{key}.{name}", element)
    elif value is not None:
        yield key, value


def shown(value: float | str) -> str:
    """Format a number or a text for a message; shorten it if it is too long (Python rejects 4,300 digits)."""
    if isinstance(value, str):
        return repr(shortened(value))
    if isinstance(value, int):
        digits = 1 + int(abs(value).bit_length() * math.log10(2))
        return str(value) if digits <= 40 else f"a whole number of about {digits} digits"
    return repr(value).removesuffix(".0")


def shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]}...{text[-10:]}"


def _bound(number: float) -> str:
    return f"{int(number):,}" if abs(number) < 1e15 and number == int(number) else f"{number:g}"


CONFIGURATION, LAYOUT, TRAINING = "configuration", "layout", "training"


class Rule(NamedTuple):
    """Settings that do not go together.

    - `settings`: `key & key: value & key != value`; a key without a value is set, or above 1 if it is of the mesh
    - `text`: the reason, and in further sentences what would work; `{key}` is a value, `{0}` the first key
    - `when`: further settings, or a function of configuration and layout, which may return values for names in braces
    - `at`: what is checked: a configuration, one with its layout, or one that trains
    """

    settings: str
    text: str
    when: str | Callable[[Any, Any], Any] = ""
    at: str = CONFIGURATION

    def mistake(self, config: Any, layout: Any = None) -> KeyedError | None:
        """Return the error of a configuration that breaks the rule; None if it keeps it."""
        for each in (self.settings, "" if callable(self.when) else self.when):
            for key, sign, wanted in _parts(each):
                if "{" not in key and not _is_met(_value(key, config, layout), sign, wanted, key.startswith("mesh.")):
                    return None
        found = self.when(config, layout) if callable(self.when) else True
        if not found:
            return None
        names = vars(config) | (found if isinstance(found, dict) else {})
        keys = [key.format(**names) for key, _, _ in _parts(self.settings)]
        first, *others = [(key, f"is {_text(_value(key, config, layout))}") for key in keys]
        beside = "".join(f" and {key} {is_what}" for key, is_what in others)
        return KeyedError(*first, f"{beside}: {self.text.format(*keys, **names)}")


@cache
def _parts(settings: str) -> list[tuple[str, str, str]]:
    every = settings.split(" & ") if settings else []
    return [each.partition(" != " if " != " in each else ": ") for each in every]


def _is_met(found: Any, sign: str, wanted: str, is_size: bool) -> bool:
    if sign == ": ":
        return _text(found) == wanted
    return found > 1 if is_size else bool(found) and (not wanted or _text(found) != wanted)


def _value(key: str, config: Any, layout: Any) -> Any:
    """Return the value of a dotted key; of an axis of the mesh its size in the layout."""
    if key.startswith("mesh."):
        return layout.mesh.shape[key.removeprefix("mesh.")]
    while key and config is not None:
        if isinstance(config, dict):
            return config.get(key)
        name, _, key = key.partition(".")
        config = config.get_choice_name(type(config)) if name == "type" else getattr(config, name, None)
    return config


def _text(value: Any) -> str:
    if value is None or is_dataclass(value):
        return "set" if value else "null"
    return shown(value) if isinstance(value, float) else shortened(format_setting(value))
