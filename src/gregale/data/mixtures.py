"""A mixture of the sources for each replica, so that replicas train on different text (DiLoCo's non-iid setting)."""

import sys
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from gregale.data.examples import (
    ExampleBatch,
    ExampleRange,
    Examples,
    Rows,
    endless,
    mixed,
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


def replica_examples(sources: Mapping[str, Rows], mixtures: Sequence[Mixture], seed: int | None) -> ReplicaExamples:
    """Return the endless training examples of each replica, mixed by its own weights.

    A source that several replicas use is divided among them in proportion to their use of it. So no two replicas see
    the same row.

    Without a seed, the rows are in order. Raises `UserError` if a source has too few rows for its replicas.
    """
    import grain

    epochs: list[dict] = [{} for _ in mixtures]
    for name, rows in sources.items():
        dataset = grain.MapDataset.source(rows)
        if seed is not None:
            dataset = dataset.shuffle(shuffle_seed(seed, f"{name}/parts"))
        bounds = cuts(name, len(rows), mixtures)
        for replica, mixture in enumerate(mixtures):
            if mixture.get(name):
                part = grain.MapDataset.source(ExampleRange(dataset, bounds[replica], bounds[replica + 1]))
                epochs[replica][name] = endless(part, f"{name}/{replica}", seed)
    first = next(iter(sources.values()))
    mixes = [mixed(own, mixture) for own, mixture in zip(epochs, mixtures, strict=True)]
    return ReplicaExamples([Examples(mix, first.sequence_length, first.rows_together) for mix in mixes])


def cuts(name: str, rows: int, mixtures: Sequence[Mixture]) -> np.ndarray:
    """Return the boundaries of a source's ranges, int64 [replica + 1]: replica k has rows cut k to cut k + 1."""
    shares = np.array([mixture.get(name, 0.0) / sum(mixture.values()) for mixture in mixtures])
    bounds = np.round(np.cumsum([0.0, *shares]) / max(shares.sum(), sys.float_info.min) * rows).astype(np.int64)
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
