"""Settings that have to be the same in several places, processes of a run or islands of a fleet, and what differs.

Such settings are *terms*: a flat mapping of keys to texts. Nothing else is needed to compare them: they travel as JSON.

    difference({"process 0": {"seed": "0"}, "process 1": {"seed": "5"}})  # seed is 0 in process 0, but 5 in process 1
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gregale.settings import shortened

Terms = Mapping[str, str]
ABSENT = "not set"
MOST_SHOWN = 5  # other keys, or members with one value, in a message


def to_text(terms: Terms) -> str:
    """Return terms as one line of JSON, in their order."""
    return json.dumps(dict(terms), separators=(",", ":"))


def from_text(text: str) -> Terms:
    """Return the terms of `to_text`; anything else is one term, which differs from all others."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and all(isinstance(each, str) for each in value.values()):
        return value
    return {"what has to agree": text}


def in_words(value: Any) -> str:
    """Return a value of a configuration as a term: on one line, a text without quotes where that is clear."""
    return value if isinstance(value, str) and value and value.isprintable() else json.dumps(value, default=str)


def difference(found: Mapping[str, Terms]) -> str:
    """Return the first key that differs, its values and whose they are, and which other keys differ; "" if none does.

    - `found`: the terms of each member, by its name
    """
    keys = dict.fromkeys(key for terms in found.values() for key in terms)
    differing = [key for key in keys if len({terms.get(key) for terms in found.values()}) > 1]
    if not differing:
        return ""
    first, *others = differing
    holders: dict[str, list[str]] = {}
    for name, terms in found.items():
        holders.setdefault(terms.get(first, ABSENT), []).append(name)
    values = [f"{shortened(in_words(value))} in {listed(names)}" for value, names in holders.items()]
    also = f"; also different: {listed([in_words(key) for key in others])}" if others else ""
    return f"{in_words(first)} is {', but '.join(values)}{also}"


def listed(words: Sequence[str], most: int = MOST_SHOWN) -> str:
    """Return words as `a, b and c`, of more than `most` the first ones and the number of the others."""
    shown = list(words[:most])
    if len(words) > most:
        shown.append(f"{len(words) - most} more")
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]
