"""MixtureHistory of sources by weight, also those that change from stage to stage."""

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gregale.data.examples import (
    ExampleBatch,
    ExampleRange,
    Examples,
    Rows,
    drawn,
    endless,
    mixed,
    shares,
    shuffle_seed,
    stacked,
)
from gregale.errors import UserError

Mixture = Mapping[str, float]
"""Weights of sources by name; a source that is left out, or has weight 0, is not drawn from."""


class ReplicaExamples:
    """Endless training examples, separate for each replica."""

    endless = True

    def __init__(self, replicas: Sequence[Examples]):
        self.replicas = tuple(replicas)
        self.sequence_length = replicas[0].sequence_length

    def batches_from(self, first: int, batch_size: int) -> int:
        """Return the number of batches from any example on: `sys.maxsize`, they never end."""
        del first, batch_size
        return sys.maxsize

    def batch(self, first: int, batch_size: int, rows: Sequence[int]) -> ExampleBatch:
        """Return some rows of the batch that begins after `first` examples of all replicas together, arrays [row, L].

        The k-th group of batch_size / replicas rows belongs to replica k: its row r is its example first / replicas +
        r.
        """
        begin, count = first // len(self.replicas), batch_size // len(self.replicas)
        return stacked([self.replicas[row // count][begin + row % count] for row in rows])


def replica_examples(
    sources: Mapping[str, Rows],
    mixtures: Sequence[Mixture],
    seed: int | None,
    counts: Sequence[int] = (),
    begin: int = 0,
) -> ReplicaExamples:
    """Return the endless training examples of each replica, mixed by its own weights.

    A source that several replicas use is divided among them in proportion to their use of it. So no two replicas see
    the same row.

    - `counts`: how many examples each replica has drawn before, in each span of the run with rows of this length
    - `begin`: each replica's number of its first example

    Without a seed, the rows are in order. Raises `UserError` if a source has too few rows for its replicas.
    """
    import grain

    one, parts, found = next(iter(sources.values())), {}, []
    for name, rows in sources.items():
        whole = grain.MapDataset.source(rows)
        if seed is not None:
            whole = whole.shuffle(shuffle_seed(seed, f"{name}/parts"))
        parts[name] = [ExampleRange(whole, *bounds) for bounds in pairwise(cuts(name, len(rows), mixtures))]
    offset = begin // one.rows_together
    for replica, given in enumerate(mixtures):
        mixture, own, seen = {name: given[name] for name in sources if given.get(name)}, {}, Counter[str]()
        for count in counts:
            seen.update(drawn(mixture, count // one.rows_together))
        for name in mixture:
            epochs = endless(grain.MapDataset.source(parts[name][replica]), f"{name}/{replica}", seed)
            own[name] = grain.MapDataset.source(ExampleRange(epochs, seen[name], sys.maxsize))
        examples = ExampleRange(mixed(own, mixture), -offset, sys.maxsize - offset)
        found.append(Examples(examples, one.sequence_length, one.rows_together))
    return ReplicaExamples(found)


def cuts(name: str, rows: int, mixtures: Sequence[Mixture]) -> np.ndarray:
    """Return the boundaries of a source's ranges, int64 [replica + 1]: replica k has rows cut k to cut k + 1."""
    shares = np.array([mixture.get(name, 0.0) / sum(mixture.values()) for mixture in mixtures])
    ends = np.cumsum([0.0, *shares]) / max(shares.sum(), sys.float_info.min)
    bounds = np.round(ends * rows).astype(np.int64)
    if ((np.diff(bounds) == 0) & (shares > 0)).any():
        raise UserError(
            f"data.replica_mixtures: the source {name} has {rows} rows to train on, and {np.sum(shares > 0)} "
            f"replicas share them by their weights, so that one would have none. Give more text or shorter sequences, "
            f"or leave {name} out of the mixture in which it weighs least."
        )
    return bounds


def check_mixtures(mixtures: Sequence[Mixture], sources: Collection[str]) -> None:
    """Raise `UserError` for an unknown source, or if all weights are zero."""
    for replica, mixture in enumerate(mixtures):
        key = f"data.replica_mixtures.{replica}"
        unknown = [name for name in mixture if name not in sources]
        if unknown:
            raise UserError(f"{key}: there is no source {unknown[0]!r}; data.sources has: {', '.join(sources)}.")
        if not any(mixture.values()):
            raise UserError(f"{key}: no source has a weight above 0: there is nothing for replica {replica} to read.")


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


MixtureHistory = tuple[MixtureStage, ...]  # of a run so far; the first one begins with example 0


def with_mixture(
    mixtures: MixtureHistory, first: int, weights: Mapping[str, float], length: int, replicas: Sequence[Mixture] = ()
) -> MixtureHistory:
    """Return the mixtures of a run that goes on with another one from example `first` on; an equal one adds nothing."""
    new = MixtureStage(first, dict(weights), length, replicas)
    if mixtures and (mixtures[-1].weighed, mixtures[-1].length) == (new.weighed, length):
        return mixtures
    return (*(each for each in mixtures if each.first < first), new)


def sources_of(mixtures: MixtureHistory) -> list[str]:
    """Return the sources from which the run has drawn, or draws from now on."""
    weighed = (pair for each in mixtures for mixture in each.weighed for pair in mixture)
    return list(dict.fromkeys(name for name, weight in weighed if weight))


def tokens_of(mixtures: MixtureHistory, examples: int) -> int:
    """Return the tokens of the first `examples` examples of a run, of which the last mixture has drawn the last."""
    ends = [*(each.first for each in mixtures[1:]), examples]
    return sum((end - each.first) * each.length for each, end in zip(mixtures, ends, strict=True))


def staged_examples(
    sources: Mapping[str, Rows], mixtures: MixtureHistory, seed: int | None
) -> Examples | ReplicaExamples:
    """Return the endless training examples of a run from the first example of its last mixture on.

    A source goes on where the mixtures before have stopped, so that no row comes again before its epoch is complete.
    MixtureHistory of another length do not count: rows of each length have epochs of their own.
    """
    import grain

    (first, weights, length, replicas), seen = mixtures[-1], Counter[str]()
    together = next(iter(sources.values())).rows_together  # a mixture draws groups of so many examples
    counts = [(each, following.first - each.first) for each, following in pairwise(mixtures) if each.length == length]
    if replicas:
        before = [count // len(replicas) for _, count in counts]
        return replica_examples(sources, replicas, seed, before, first // len(replicas))
    for each, count in counts:
        seen.update(drawn(each.weights, count // together))
    remaining = {}
    for name in shares(weights):
        epochs = endless(grain.MapDataset.source(sources[name]), name, seed)
        remaining[name] = grain.MapDataset.source(ExampleRange(epochs, seen[name], sys.maxsize))
    begin = first // together
    return Examples(ExampleRange(mixed(remaining, weights), -begin, sys.maxsize - begin), length, together)
