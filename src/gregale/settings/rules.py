"""Rules between settings, from which come the check, its message and a page of the documentation."""

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from typing import Any, NamedTuple

from gregale.errors import KeyedError
from gregale.formatting import format_setting
from gregale.settings import shortened, shown

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
