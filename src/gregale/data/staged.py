"""Examples of a run whose mixture of sources changes: row i as a pure function of i and of the mixtures so far."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from gregale.data.examples import ExampleRange, Examples, Rows, drawn, endless, mixed, shares
from gregale.data.mixtures import Mixture, ReplicaExamples, replica_examples


class MixtureStage(NamedTuple):
    """The weights of the sources from example `first` on, in the order of the mixture, and the length of its rows.

    - `replicas`: the weights of each replica, in place of `weights`; empty: all replicas have one mixture
    """

    first: int
    weights: dict[str, float]
    length: int
    replicas: Sequence[Mixture] = ()

    @property
    def weighed(self) -> list[list[tuple[str, float]]]:
        """Return the sources with their weights in each mixture, in the order of the mixture."""
        return [list(each.items()) for each in self.replicas or [self.weights]]


Mixtures = tuple[MixtureStage, ...]  # of a run so far; the first one begins with example 0


def with_mixture(
    mixtures: Mixtures, first: int, weights: Mapping[str, float], length: int, replicas: Sequence[Mixture] = ()
) -> Mixtures:
    """Return the mixtures of a run that goes on with another one from example `first` on; an equal one adds nothing."""
    new = MixtureStage(first, dict(weights), length, replicas)
    if mixtures and (mixtures[-1].weighed, mixtures[-1].length) == (new.weighed, length):
        return mixtures
    return (*(each for each in mixtures if each.first < first), new)


def sources_of(mixtures: Mixtures) -> list[str]:
    """Return the sources from which the run has drawn, or draws from now on."""
    weighed = (pair for each in mixtures for mixture in each.weighed for pair in mixture)
    return list(dict.fromkeys(name for name, weight in weighed if weight))


def tokens_of(mixtures: Mixtures, examples: int) -> int:
    """Return the tokens of the first `examples` examples of a run, of which the last mixture has drawn the last."""
    ends = [*(each.first for each in mixtures[1:]), examples]
    return sum((end - each.first) * each.length for each, end in zip(mixtures, ends, strict=True))


def staged_examples(sources: Mapping[str, Rows], mixtures: Mixtures, seed: int | None) -> Examples | ReplicaExamples:
    """Return the endless training examples of a run from the first example of its last mixture on.

    A source goes on where the mixtures before have stopped, so that no row comes again before its epoch is complete.
    Mixtures of another length do not count: rows of each length have epochs of their own.
    """
    import grain

    (first, weights, length, replicas), seen = mixtures[-1], Counter[str]()
    together = next(iter(sources.values())).rows_together  # a mixture draws groups of so many examples
    counts = [
        (each, following.first - each.first)
        for each, following in pairwise(mixtures)
        if (each.length, len(each.replicas)) == (length, len(replicas))
    ]
    if replicas:
        before = [(each.replicas, count // len(replicas)) for each, count in counts]
        return replica_examples(sources, replicas, seed, before, first // len(replicas))
    for each, count in counts:
        seen.update(drawn(each.weights, count // together))
    remaining = {}
    for name in shares(weights):
        epochs = endless(grain.MapDataset.source(sources[name]), name, seed)
        remaining[name] = grain.MapDataset.source(ExampleRange(epochs, seen[name], sys.maxsize))
    begin = first // together
    return Examples(ExampleRange(mixed(remaining, weights), -begin, sys.maxsize - begin), length, together)
