"""The parts of a message that the members of a round average, by the rates of their links: a pure function of a view.

A member that averages the part x of R members' messages of M bytes sends (1 - x) M and (R - 1) x M, and receives as
much: (1 + (R - 2) x) M. With a link of rate b this takes at least M / b, for x = 0. Equal parts take
2 (R - 1) / R M / b. `parts` minimises, over the members that average something, the largest time:

    x_k = max(0, T b_k - 1) / (R - 2),  sum_k x_k = 1

A member whose own message takes longer than T averages nothing.
"""

from collections.abc import Sequence
from math import fsum, log2

WHOLE = 256  # parts are integers of this sum, so that all members compute the same
FASTEST = 54  # the level of 1 Gbit/s: the processor bounds a round on faster links
TOLERANCE = 3  # levels within which links count as equal
ROOT = 2**0.5


def level(bytes_per_second: float) -> int:
    """Return a rate as a power of the root of 2, at least 1 and at most `FASTEST`."""
    return round(min(max(2 * log2(max(bytes_per_second, 1.0)), 1), FASTEST))


def parts(levels: Sequence[int]) -> tuple[int, ...]:
    """Return the part of each member by the level of its link, 0 if unknown; () if all average the same.

    An unknown level counts as the median of the others.
    """
    count, known = len(levels), sorted(min(each, FASTEST) for each in levels if each)
    if count < 3 or not known or known[-1] - known[0] <= TOLERANCE:
        return ()
    median = known[(len(known) - 1) // 2]
    rates = [rate(min(each or median, FASTEST)) for each in levels]
    fastest = sorted(rates, reverse=True)
    # T if the n fastest average something, for the largest n for which the slowest of them does.
    times = [(count - 2 + n) / fsum(fastest[:n]) for n in range(1, count + 1)]
    time = next(time for time, slowest in reversed(list(zip(times, fastest, strict=True))) if time * slowest > 1)
    shares = [WHOLE * max(0.0, time * each - 1) / (count - 2) for each in rates]
    found = [int(share) for share in shares]
    order = sorted(range(count), key=lambda rank: (found[rank] - shares[rank], rank))
    for rank in order[: WHOLE - sum(found)]:
        found[rank] += 1
    return tuple(found)


def rate(number: int) -> float:
    """Return the bytes a second of a level, the same bits everywhere."""
    return 2.0 ** (number // 2) * (ROOT if number % 2 else 1.0)
