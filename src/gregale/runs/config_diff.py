"""The differences between two configurations, and whether a run can resume with them."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import draccus

from gregale.formatting import format_setting
from gregale.settings import Fixed
from gregale.settings.decoding import TYPE, choice_name, join


@dataclass(frozen=True)
class Change:
    """A key with its old and new value; `fixed` is set if a run cannot resume with the change."""

    key: str
    before: Any
    now: Any
    fixed: Fixed | None = None

    def __str__(self) -> str:
        return f"{self.key} {format_setting(self.before)} -> {format_setting(self.now)}"


def changes(before: Any, now: Any, prefix: str = "") -> list[Change]:
    """Return the keys that differ between two configurations of one class, in the order of the fields.

    Another choice is a change of `type`, in addition to the other differences. Below a field whose metadata has
    `begins_anew` no key is fixed, because a change resets its part of the state, or no state depends on it.
    """
    found = []
    declared = {each.name: each for each in (*fields(before), *fields(now))}
    for name, each in declared.items():
        old, new = getattr(before, name, None), getattr(now, name, None)
        below = _changes(join(prefix, name), old, new, each.metadata.get("fixed"))
        found += [replace(one, fixed=None) for one in below] if "begins_anew" in each.metadata else below
    return found


def _changes(key: str, before: Any, now: Any, fixed: Fixed | None) -> list[Change]:
    if before == now:
        return []
    if is_dataclass(before) and is_dataclass(now):
        inner = changes(before, now, key)
        if type(before) is type(now):
            return inner
        return [_change(join(key, TYPE), choice_name(type(before), before), choice_name(type(now), now), fixed), *inner]
    if isinstance(before, dict) and isinstance(now, dict):
        names = [] if list(before) == list(now) else [_change(key, list(before), list(now), fixed)]
        common = [name for name in before if name in now]
        return names + [each for name in common for each in _changes(join(key, name), before[name], now[name], None)]
    return [_change(key, before, now, fixed)]


def _change(key: str, before: Any, now: Any, fixed: Fixed | None) -> Change:
    before, now = draccus.encode(before), draccus.encode(now)
    return Change(key, before, now, fixed if fixed and fixed.forbids(before, now) else None)
