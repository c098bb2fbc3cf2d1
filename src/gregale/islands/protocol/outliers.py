"""The detection of outlier messages in a round, which contribute nothing.

A message of weight w is expected to have the lower median, over the compared messages, of

    norm x max(1, w / weight)

because an island that has trained on more tokens has moved further. Two comparisons are made: with the round's finite
messages, and with one message of the previous rounds, the lower median of the last `KEPT` rounds in the agreed record.
A message is left out if its norm exceeds `factor` times both expected norms, or if it is not finite. So of two islands,
the one that differs from the previous rounds is left out; an island alone never is. An island that moves less than the
others excludes no other.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from statistics import median_low
from typing import NamedTuple

KEPT = 15  # rounds
NOT_FINITE = "is not finite"


class Size(NamedTuple):
    """The size of a message: its root mean square, and its weight in tokens."""

    norm: float
    weight: float


def expected(weight: float, compared: Collection[Size]) -> float:
    """Return the expected norm of a message of this weight; infinity if there is nothing to compare it with."""
    found = [norm * max(1.0, weight / other) for norm, other in compared if norm > 0 and other > 0]
    return median_low(found) if found else math.inf


def left_out(messages: Mapping[str, Size | None], usual: Size | None, factor: float) -> dict[str, str]:
    """Return why messages are left out of a round, by name; the others count.

    - `messages`: sizes by name; None: not finite
    - `usual`: the median size of the previous rounds; None: there were none
    - `factor`: the limit, as a multiple of the expected norm
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
    """Return the lower median by norm of the sizes above 0; None if there are none."""
    known = [size for size in sizes if size.norm > 0]
    return median_low(known) if known else None
