"""Examples of a run whose mixture of sources changes: row i as a pure function of i and of the mixtures so far."""

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from gregale.data.examples import ExampleBatch, ExampleRange, Examples, Rows, endless, mixed, shares, training_examples

if TYPE_CHECKING:
    import grain


class MixtureStage(NamedTuple):
    """The weights of the sources from example `first` on; the order of the sources is that of the mixture."""

    first: int
    weights: dict[str, float]


Mixtures = tuple[MixtureStage, ...]
"""The mixtures of a run so far; the first one begins with example 0."""


def with_mixture(mixtures: Mixtures, first: int, weights: Mapping[str, float]) -> Mixtures:
    """Return the mixtures of a run that goes on with other weights from example `first` on; equal ones add nothing."""
    if mixtures and list(mixtures[-1].weights.items()) == list(weights.items()):
        return mixtures
    return (*(each for each in mixtures if each.first < first), MixtureStage(first, dict(weights)))


def to_json(mixtures: Mixtures) -> list[list[Any]]:
    """Return mixtures as JSON, with the weights as pairs, because their order counts."""
    return [[first, [list(pair) for pair in weights.items()]] for first, weights in mixtures]


def from_json(stored: Sequence[Sequence[Any]]) -> Mixtures:
    return tuple(MixtureStage(first, dict(pairs)) for first, pairs in stored)


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


class StagedExamples:
    """An endless data set of parts; part k has the examples from `firsts[k]` on."""

    def __init__(self, firsts: Sequence[int], parts: Sequence["grain.MapDataset"]):
        self._firsts, self._parts = firsts, parts

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> ExampleBatch:
        part = bisect_right(self._firsts, index) - 1
        return self._parts[part][index - self._firsts[part]]  # type: ignore[return-value]


def staged_examples(sources: Mapping[str, Rows], mixtures: Mixtures, seed: int | None) -> Examples:
    """Return the endless training examples of a run with several mixtures.

    In each mixture a source goes on where the mixtures before it have stopped, so that no row comes again before its
    epoch is complete. With one mixture they are `training_examples`.
    """
    import grain

    if len(mixtures) == 1:
        return training_examples(sources, mixtures[0].weights, seed)
    epochs = {name: endless(grain.MapDataset.source(rows), name, seed) for name, rows in sources.items()}
    seen, parts = Counter[str](), []
    for (first, weights), following in zip_longest(mixtures, mixtures[1:]):
        ranges = {name: ExampleRange(epochs[name], seen[name], sys.maxsize) for name in shares(weights)}
        parts.append(mixed({name: grain.MapDataset.source(each) for name, each in ranges.items()}, weights))
        if following is not None:
            seen.update(drawn(weights, following.first - first))
    dataset = StagedExamples([each.first for each in mixtures], parts)
    return Examples(dataset, next(iter(sources.values())).sequence_length)
