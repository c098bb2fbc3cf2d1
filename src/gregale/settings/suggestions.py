"""Suggestions for an unknown key of a configuration, and the table of all keys in which they are looked up."""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from gregale.settings.config_schema import Entry, entries, join
from gregale.settings.other_projects import names_of

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
