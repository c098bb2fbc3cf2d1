"""Names of scopes (`jax.named_scope`) that tell a reader of a program what its operations do not tell.

A loop that stops by a computed condition does not tell how often it runs, and a product does not tell which of its
results a mask hides. A jaxpr and a compiled program have the names of the scopes around each operation.
"""

import re
from collections.abc import Sequence

import jax

# Loops that in practice never run: over rounds of an exchange after the first, which even routing fills, and for a sum
# that is out of range.
FURTHER_ROUNDS, AGAIN = "further_rounds", "largest_logit_again"
SUM = "sum_by_product"  # of products that only add numbers up, which count no FLOPs
_TIMES, _SHARE = re.compile(r"runs_(\d+)_times"), re.compile(r"sees_(\d+)_of_(\d+)")


def runs(times: int):
    """Return a scope whose loops run this number of times."""
    return jax.named_scope(f"runs_{times}_times")


def sees(positions: int, window: int | None):
    """Return a scope whose products of queries and keys a causal mask hides in part: all but `window` keys a query."""
    return jax.named_scope(f"sees_{visible(positions, [window]):.0f}_of_{positions**2}")


def visible(positions: int, windows: Sequence[int | None]) -> float:
    """Return the mean over windows of a causal mask's visible pairs: sum of min(i, window) for i to positions."""
    reaches = [min(positions, window or positions) for window in windows]
    return sum(reach * (reach + 1) / 2 + (positions - reach) * reach for reach in reaches) / len(reaches)


def times_of(scopes: str) -> int | None:
    """Return how often the loop inside of some scopes runs; None: they do not tell."""
    found = _TIMES.findall(scopes)
    return 0 if FURTHER_ROUNDS in scopes or AGAIN in scopes else int(found[-1]) if found else None


def seen_share(scopes: str) -> float:
    """Return the share of the pairs of queries and keys that a mask shows, by the names of the scopes; 1: all."""
    found = _SHARE.findall(scopes)
    return int(found[-1][0]) / int(found[-1][1]) if found else 1.0
