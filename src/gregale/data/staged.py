"""Examples of a run whose mixture of sources changes: row i as a pure function of i and of the mixtures so far."""

import sys
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from gregale.data.examples import ExampleRange, Examples, Rows, endless, mixed, shares


class MixtureStage(NamedTuple):
    """The weights of the sources from example `first` on, in the order of the mixture, and the length of its rows."""

    first: int
    weights: dict[str, float]
    length: int


Mixtures = tuple[MixtureStage, ...]  # of a run so far; the first one begins with example 0


def with_mixture(mixtures: Mixtures, first: int, weights: Mapping[str, float], length: int) -> Mixtures:
    """Return the mixtures of a run that goes on with another one from example `first` on; an equal one adds nothing."""
    if mixtures and (list(mixtures[-1].weights.items()), mixtures[-1].length) == (list(weights.items()), length):
        return mixtures
    return (*(each for each in mixtures if each.first < first), MixtureStage(first, dict(weights), length))


def sources_of(mixtures: Mixtures) -> list[str]:
    """Return the sources from which the run has drawn, or draws from now on."""
    return list(dict.fromkeys(name for each in mixtures for name, weight in each.weights.items() if weight))


def drawn(weights: Mapping[str, float], count: int) -> Counter[str]:
    """Return how many of the first `count` examples of a mixture are of each source, exactly.

    The rule is that of `grain`. Of the n examples that the sources before it have left, a source of share p has
    n - floor(n q / (p + q)), where q is the sum of the shares after it.
    """
    own, rest, found = shares(weights), count, Counter[str]()
    total = sum(own.values())
    for name, share in own.items():
        after = rest * (total - share) // total
        found[name] = rest - after
        total, rest = total - share, after
    return found


def tokens_of(mixtures: Mixtures, examples: int) -> int:
    """Return the tokens of the first `examples` examples of a run, of which the last mixture has drawn the last."""
    ends = [*(each.first for each in mixtures[1:]), examples]
    return sum((end - each.first) * each.length for each, end in zip(mixtures, ends, strict=True))


def staged_examples(sources: Mapping[str, Rows], mixtures: Mixtures, seed: int | None) -> Examples:
    """Return the endless training examples of a run from the first example of its last mixture on.

    A source goes on where the mixtures before have stopped, so that no row comes again before its epoch is complete.
    Mixtures of another length do not count: rows of each length have epochs of their own.
    """
    import grain

    (first, weights, length), seen = mixtures[-1], Counter[str]()
    together = next(iter(sources.values())).rows_together  # a mixture draws groups of so many examples
    for each, following in pairwise(mixtures):
        if each.length == length:
            seen.update(drawn(each.weights, (following.first - each.first) // together))
    remaining = {}
    for name in shares(weights):
        epochs = endless(grain.MapDataset.source(sources[name]), name, seed)
        remaining[name] = grain.MapDataset.source(ExampleRange(epochs, seen[name], sys.maxsize))
    begin = first // together
    return Examples(ExampleRange(mixed(remaining, weights), -begin, sys.maxsize - begin), length, together)
