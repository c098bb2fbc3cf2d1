"""Examples: row i of the training data as a pure function of i.

A stream of documents is cut into windows of L + 1 tokens at a stride of L. So every token but the first of the stream
is a target exactly once; the remainder at the end that does not fill a window is left out. Or whole documents are
packed into rows (`gregale.data.packing`). The rows of each source are shuffled separately and anew in each epoch; then
the sources are mixed by weight. `grain` does both by arithmetic on the index, so any example is available without the
earlier ones. (Grain imports JAX. It is imported only where it is used, because the tokenizing processes and `--help`
work without it.)
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gregale.data.packing import MORE_BYTES, PAIRS, ExampleBatch, PackedRows, Packing, PairRows
from gregale.data.sources.base import CONCAT
from gregale.data.stream import DocumentStream
from gregale.errors import UserError

if TYPE_CHECKING:
    import grain

WEIGHT_STEPS = 100  # weights are rounded to hundredths of the smallest


class Windows(Sequence[ExampleBatch]):
    """The windows of a stream, in order, each as an example.

    - `sequence_length`: L, tokens in an example.
    - `cross_documents`: whether attention and loss cross document boundaries.
    - `evaluates`: whether examples also have `more_bytes`, int32 [L]: for each target, its bytes of text beyond those
      of its vocabulary entry.
    """

    note = ""
    rows_together = 1

    def __init__(self, stream: DocumentStream, sequence_length: int, cross_documents: bool, *, evaluates: bool = False):
        self.stream, self.sequence_length = stream, sequence_length
        self._cross, self._evaluates = cross_documents, evaluates

    def __len__(self) -> int:
        return window_count(self.stream, self.sequence_length)

    def __getitem__(self, index):
        start = int(index) * self.sequence_length
        stop = start + self.sequence_length + 1
        tokens, documents = self.stream.read(start, stop)
        if self._cross:
            documents = np.zeros_like(documents)
        example = make_example(tokens, documents, self.stream.supervised(start, stop))
        if self._evaluates:
            example[MORE_BYTES] = self.stream.more_bytes(start + 1, stop).astype(np.int32)
        return example

    @property
    def targets(self) -> int:
        """Return the number of targets in all windows that the loss is on."""
        starts, stops = self.stream.starts[:-1], self.stream.starts[1:]
        ends = np.minimum(stops, len(self) * self.sequence_length + 1)
        starts = np.maximum(starts, 1) if self._cross else starts + 1
        return int(self.stream.supervised_in(np.minimum(starts, ends), ends).sum())

    @property
    def needs(self) -> str:
        return f"A window takes {self.sequence_length} + 1 = {self.sequence_length + 1} tokens"


Rows = Windows | PackedRows


def rows_of(stream: DocumentStream, sequence_length: int, packing: Packing, *, evaluates: bool = False) -> Rows:
    """Return the rows of a stream's documents; raise `UserError` for a document that is too long for them."""
    if packing.kind == CONCAT:
        return Windows(stream, sequence_length, packing.cross_documents, evaluates=evaluates)
    kind = PairRows if packing.kind == PAIRS else PackedRows
    return kind(stream, sequence_length, packing, evaluates=evaluates)


def window_count(stream: DocumentStream, sequence_length: int) -> int:
    """Return how many windows of L + 1 tokens at a stride of L fit in a stream: floor((tokens - 1) / L)."""
    return max(0, len(stream) - 1) // sequence_length


def make_example(tokens: np.ndarray, documents: np.ndarray, supervised: np.ndarray | None = None) -> ExampleBatch:
    """Return one window as the arrays that a model takes.

    - `tokens`: int32 [L + 1].
    - `documents`: the index of each token's document [L + 1], not decreasing.
    - `supervised`: whether the loss is on each token, bool [L + 1]; by default on all.

    Returns `tokens` int32 [L], `targets` int32 [L] (the next token), `loss_mask` float32 [L] (0 where the target is of
    another document, or the loss is not on it), `segment_ids` int32 [L] (documents counted from 0 within the window;
    attention stays within one), `positions` int32 [L] (from 0 at the first token of each document in the window).
    """
    positions = np.arange(len(tokens) - 1)
    mask = documents[1:] == documents[:-1]
    begins = np.diff(documents[:-1], prepend=documents[:1] - 1) > 0
    return {
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "loss_mask": (mask if supervised is None else mask & supervised[1:]).astype(np.float32),
        "segment_ids": (np.cumsum(begins) - 1).astype(np.int32),
        "positions": (positions - np.maximum.accumulate(np.where(begins, positions, 0))).astype(np.int32),
    }


class Examples:
    """An endless or finite sequence of `make_example` results of L tokens; `examples[i]` depends only on i.

    - `dataset`: has a length and the example of every index below it, or a group of `rows_together` of them, arrays
      [row, L]
    """

    def __init__(self, dataset: "grain.MapDataset | Any", sequence_length: int, rows_together: int = 1):
        self._dataset = dataset
        self.sequence_length, self.rows_together = sequence_length, rows_together

    def __len__(self) -> int:
        """Return the number of examples; `sys.maxsize` if endless."""
        return min(len(self._dataset) * self.rows_together, sys.maxsize)

    @property
    def endless(self) -> bool:
        return len(self) == sys.maxsize

    def __getitem__(self, index: int) -> ExampleBatch:
        """Return example `index`: arrays [L], see `make_example`."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        group, row = divmod(index, self.rows_together)
        found: ExampleBatch = self._dataset[group]  # type: ignore[assignment]
        return found if self.rows_together == 1 else {key: array[row] for key, array in found.items()}

    def rows(self, indices: Sequence[int]) -> ExampleBatch:
        """Return several examples as arrays [row, L]. A row past the end of a finite set is zero, its mask too."""
        return stacked([self[int(index)] if index < len(self) else self._blank for index in indices])

    @cached_property
    def _blank(self) -> ExampleBatch:
        """Return an example without targets."""
        return {key: np.zeros_like(array) for key, array in self[0].items()}

    def batches_from(self, first: int, batch_size: int) -> int:
        """Return the number of batches from example `first` on; `sys.maxsize` if endless."""
        return len(self) if self.endless else -(-max(0, len(self) - first) // batch_size)

    def batch(self, first: int, batch_size: int, rows: Sequence[int]) -> ExampleBatch:
        """Return some rows of the batch that begins with example `first`, [row, L]: row r is example first + r."""
        del batch_size
        return self.rows([first + row for row in rows])


def stacked(examples: Sequence[ExampleBatch]) -> ExampleBatch:
    """Return examples as arrays [row, L]."""
    return {key: np.stack([example[key] for example in examples]) for key in examples[0]}


def training_examples(sources: Mapping[str, Rows], weights: Mapping[str, float], seed: int | None) -> Examples:
    """Return the endless training examples: epochs of each source, mixed by weight; without a seed, in order."""
    import grain

    epochs = {name: endless(grain.MapDataset.source(rows), name, seed) for name, rows in sources.items()}
    first = next(iter(sources.values()))
    return Examples(mixed(epochs, weights), first.sequence_length, first.rows_together)


def endless(dataset: "grain.MapDataset", name: str, seed: int | None) -> "grain.MapDataset":
    """Return the epochs of a source, each shuffled differently; with seed None, in the given order."""
    return (dataset if seed is None else dataset.shuffle(shuffle_seed(seed, name))).repeat()


def mixed(datasets: Mapping[str, "grain.MapDataset"], weights: Mapping[str, float]) -> "grain.MapDataset":
    """Return endless sources mixed evenly by their `shares`."""
    import grain

    own = shares({name: weights[name] for name in datasets})
    parents = [datasets[name] for name in own]
    return parents[0] if len(parents) == 1 else grain.MapDataset.mix(parents, list(own.values()))


def shares(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the weights above 0 in hundredths of the smallest one, rounded."""
    own = {name: weight for name, weight in weights.items() if weight}
    return {name: round(WEIGHT_STEPS * weight / min(own.values())) for name, weight in own.items()}


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


class ExampleRange(Sequence[ExampleBatch]):
    """The examples of a data set from `start` to `stop`.

    A slice of grain would pass the epoch to the data set's own shuffle and have other examples in each epoch.
    """

    def __init__(self, dataset: "grain.MapDataset | Any", start: int, stop: int):
        self._dataset, self._start, self._stop = dataset, int(start), int(stop)

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index):
        return self._dataset[self._start + index]


def shuffle_seed(seed: int, name: str) -> int:
    """Return a 32-bit seed for one source; grain adds the epoch to it, so the seeds must differ widely."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4])


def held_out_examples(sources: Mapping[str, Rows]) -> Examples:
    """Return every held-out row once, in order; raise `UserError` if there is none."""
    first = next(iter(sources.values()))
    if not any(map(len, sources.values())):
        found = ", ".join(f"{name} {len(rows.stream)}" for name, rows in sources.items())
        raise UserError(
            f"data.held_out: too little text for a window to train on and one that is held out. {first.needs}; the "
            f"held-out tokens are: {found}. Shorten the sequences, give more text, or set data.held_out to 0 "
            "(data.validation can name other text to evaluate on)."
        )
    return in_order(list(sources.values()))


def validation_examples(rows: Rows) -> Examples:
    """Return every row of a validation text once, in order; raise `UserError` if there is none."""
    if not len(rows):
        raise UserError(
            f"too little text to evaluate on. {rows.needs}, and there are {len(rows.stream)}. Give more text, or train "
            "with shorter sequences."
        )
    return in_order([rows])


def in_order(parts: Sequence[Rows]) -> Examples:
    """Return every row of some streams once, in order."""
    import grain

    datasets = [grain.MapDataset.source(rows) for rows in parts if len(rows)]
    return Examples(grain.MapDataset.concatenate(datasets), parts[0].sequence_length, parts[0].rows_together)
