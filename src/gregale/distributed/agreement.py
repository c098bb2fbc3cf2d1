"""Comparison of settings that the processes of a run, or the islands of a fleet, must have in common.

Such settings are *terms*: a flat mapping of keys to texts, sent as JSON.
"""

import json
from collections.abc import Mapping
from typing import Any

from gregale.formatting import listed
from gregale.settings import shortened

Terms = Mapping[str, str]
ABSENT = "not set"


def to_text(terms: Terms) -> str:
    """Encode terms as one line of JSON, in their order."""
    return json.dumps(dict(terms), separators=(",", ":"))


def from_text(text: str) -> Terms:
    """Decode terms of `to_text`; return any other text as one term, which differs from all others."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and all(isinstance(each, str) for each in value.values()):
        return value
    return {"what has to agree": text}


def format_term(value: Any) -> str:
    """Format a configuration value as a term on one line; a text has no quotes where that is unambiguous."""
    return value if isinstance(value, str) and value and value.isprintable() else json.dumps(value, default=str)


def difference(found: Mapping[str, Terms]) -> str:
    """Return a text with the first differing key, its value in each member, and the other differing keys; "" if none.

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
    values = [f"{shortened(format_term(value))} in {listed(names)}" for value, names in holders.items()]
    also = f"; also different: {listed([format_term(key) for key in others])}" if others else ""
    return f"{format_term(first)} is {', but '.join(values)}{also}"
