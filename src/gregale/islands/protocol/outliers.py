"""Which messages of a round are unlike the others, so that they contribute nothing.

A message of weight w is expected to have the lower median, over the messages that it is compared with, of

    norm x max(1, w / weight)

since an island that has trained on more tokens has moved further. It is compared with the round's finite messages, and
with what was usual in the rounds before: one message, the lower median of the last `KEPT` rounds, which is part of the
agreed record. It is left out if its norm is more than `factor` times what both comparisons expect, or if it is not
finite. So of two islands the one that is out of line with the rounds before is left out; an island alone never is; and
one that moves less than the others leaves nobody out.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from statistics import median_low
from typing import NamedTuple

KEPT = 15  # rounds
NOT_FINITE = "is not finite"


class Size(NamedTuple):
    """Of a message: its root mean square, and its weight in tokens."""

    norm: float
    weight: float


def expected(weight: float, compared: Collection[Size]) -> float:
    """The norm that a message of this weight is expected to have; infinity if there is nothing to compare it with."""
    found = [norm * max(1.0, weight / other) for norm, other in compared if norm > 0 and other > 0]
    return median_low(found) if found else math.inf


def left_out(messages: Mapping[str, Size | None], usual: Size | None, factor: float) -> dict[str, str]:
    """Why messages are left out of a round, by name; those of the others count.

    - `messages`: None: it is not finite
    - `usual`: in the rounds before; None: there were none
    - `factor`: times what is expected
    """
    sizes = [size for size in messages.values() if size is not None]
    reasons = {}
    for name, size in messages.items():
        if size is None:
            reasons[name] = NOT_FINITE
            continue
        expects = expected(size.weight, sizes)
        if usual is not None:
            expects = max(expects, expected(size.weight, [usual]))
        if size.norm > factor * expects:
            reasons[name] = f"has the norm {size.norm:.3g}, more than {factor:g} times the {expects:.3g} expected of it"
    return reasons


def median(sizes: Iterable[Size]) -> Size | None:
    """The lower median by norm, of those that are not 0; None if there are none."""
    known = [size for size in sizes if size.norm > 0]
    return median_low(known) if known else None
