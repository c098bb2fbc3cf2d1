"""Packing: whole documents as rows of L tokens, without cuts.

A document of n tokens has n - 1 targets and takes as many places of a row: its last token is no input. So a row of L
places holds a document of at most L + 1 tokens, or several whose targets are at most L. A document of one token has no
target and is in no row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gregale.data.sources.base import CONCAT, FIT, KEEP_END, PLACES_SHOWN, REFUSE
from gregale.data.stream import DocumentStream
from gregale.errors import UserError

ExampleBatch = dict[str, np.ndarray]
MORE_BYTES = "more_bytes"
PAIRS = "pairs"  # a packing: one document a row, and two rows an example
WINDOW_ROWS = 128  # that the documents of a window would fill on average
GROUP = 1 << 22  # documents packed at once, for memory: 4 arrays of as many int32


class Packing(NamedTuple):
    """How the documents of a source become rows; see the keys of `SourceConfig` and `DataConfig`."""

    kind: str = CONCAT
    long_documents: str = REFUSE
    cross_documents: bool = False


class PackedRows(Sequence[ExampleBatch]):
    """Rows of whole documents, each as an example (see `gregale.data.examples.make_example`).

    A row has its documents in the order of the stream, then padding: token 0 without loss, in a segment of its own.

    - `stream`: the documents
    - `sequence_length`: L
    - `packing`: FIT for `first_fit`, or PAD for one document a row; a longer document is cut to L + 1 tokens or refused
    - `evaluates`: whether examples also have `more_bytes`, as in `gregale.data.examples.Windows`

    - `targets`: the number of targets in all rows that the loss is on
    - `note`: a sentence about the documents that are cut, "" if there are none
    """

    needs = "A row takes a document of at least 2 tokens"
    rows_together = 1

    def __init__(self, stream: DocumentStream, sequence_length: int, packing: Packing, *, evaluates: bool = False):
        self.stream, self.sequence_length = stream, sequence_length
        self._keeps_end, self._evaluates = packing.long_documents == KEEP_END, evaluates
        lengths = np.diff(stream.starts)
        self.note = self._note(lengths, packing)
        sizes = np.minimum(lengths - 1, sequence_length)
        stops = stream.starts[1:] if self._keeps_end else stream.starts[:-1] + 1 + sizes
        targets = stream.supervised_in(stops - sizes, stops)
        self.targets = int(targets.sum())
        lost = (targets == 0) & (stream.supervised_in(stream.starts[:-1] + 1, stream.starts[1:]) > 0)
        if lost.any():
            self.note += f"; {lost.sum():,} of them keep no token that the loss is on"
        documents = np.flatnonzero(sizes).astype(np.int32)
        sizes = sizes[documents]
        if packing.kind == FIT:
            rows = first_fit(sizes, sequence_length)
            self._documents = documents[np.argsort(rows, kind="stable")]
            self._firsts = np.concatenate([[0], np.bincount(rows)]).cumsum()
        else:
            self._documents, self._firsts = documents, np.arange(len(documents) + 1)

    def _note(self, lengths: np.ndarray, packing: Packing) -> str:
        """Return `note`; raise `UserError` if there are documents to cut, and `packing` refuses them."""
        most = self.sequence_length + 1
        long = np.flatnonzero(lengths > most)
        if not len(long):
            return ""
        first = [f"{number:,}" for number in self.stream.numbers[long[:PLACES_SHOWN]]]
        named = f"number {', '.join(first)}{', ...' if len(long) > len(first) else ''}, counted from 0"
        found = (
            f"{len(long):,} of {len(lengths):,} documents have more than the {most - 1} + 1 = {most:,} tokens of a row"
        )
        if packing.long_documents == REFUSE:
            raise UserError(
                f"long_documents: {found} (the longest {lengths.max():,}): {named}. packing {packing.kind} does not "
                "cut documents by itself. Set long_documents to keep_start or keep_end, which leave out the rest, or "
                f"batch.sequence_length to at least {lengths.max() - 1:,}."
            )
        left = int((lengths[long] - most).sum())
        return f"{found}; long_documents {packing.long_documents} leaves out {left:,} tokens of them: {named}"

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index):
        documents = self._documents[self._firsts[index] : self._firsts[index + 1]]
        starts, stops = self.stream.starts[documents], self.stream.starts[documents + 1]
        sizes = np.minimum(stops - starts - 1, self.sequence_length)
        if self._keeps_end:
            starts = stops - 1 - sizes
        padded = np.append(sizes, self.sequence_length - sizes.sum())
        segments = np.repeat(np.arange(len(padded)), padded)
        positions = np.arange(self.sequence_length) - np.repeat(padded.cumsum() - padded, padded)
        is_text = segments < len(documents)
        owners = documents[segments[is_text]]
        inputs = starts[segments[is_text]] + positions[is_text]

        def filled(values: np.ndarray, dtype: type = np.int32) -> np.ndarray:
            return np.pad(values.astype(dtype), (0, self.sequence_length - len(values)))

        example = {
            "tokens": filled(self.stream.tokens_at(inputs, owners)),
            "targets": filled(self.stream.tokens_at(inputs + 1, owners)),
            "loss_mask": filled(self.stream.supervised_at(inputs + 1, owners), np.float32),
            "segment_ids": segments.astype(np.int32),
            "positions": positions.astype(np.int32),
        }
        if self._evaluates:
            example[MORE_BYTES] = filled(self.stream.more_bytes_at(inputs + 1, owners))
        return example


class PairRows(PackedRows):
    """Pairs of adjacent documents, padded, each as an example of two rows: arrays [2, L]."""

    rows_together = 2

    def __len__(self) -> int:
        return super().__len__() // 2

    def __getitem__(self, index):
        chosen, rejected = (super(PairRows, self).__getitem__(2 * index + row) for row in (0, 1))
        return {key: np.stack([chosen[key], rejected[key]]) for key in chosen}


def first_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """Return the row of each document by first-fit decreasing within windows, int64 [document].

    Windows are consecutive documents, as many as would fill `WINDOW_ROWS` rows on average. In a window the largest
    document comes first, of equal ones the earlier. Each goes to the first row of the window with room for it, or to a
    new one. Rows are numbered window by window. All windows of a group take their next document at once.

    - `sizes`: places of each document, from 1 to `room`, [document]
    - `room`: places of a row
    """
    if not len(sizes):
        return np.zeros(0, np.int64)
    window = min(len(sizes), -(-WINDOW_ROWS * room * len(sizes) // int(sizes.sum())))
    windows = np.zeros((-(-len(sizes) // window), window), np.int32)
    windows.reshape(-1)[: len(sizes)] = sizes  # the last window ends with documents of size 0, which take no place
    rows, opened = np.zeros(windows.shape, np.int64), 0
    step = max(1, GROUP // window)
    for first in range(0, len(windows), step):
        own = windows[first : first + step]
        order = np.argsort(-own, axis=1, kind="stable")
        found, used = placed(np.take_along_axis(own, order, 1).T, room)
        np.put_along_axis(rows[first : first + step], order, found.T + (opened + used.cumsum() - used)[:, None], 1)
        opened += int(used.sum())
    return rows.reshape(-1)[: len(sizes)]


def placed(sizes: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row with room for each document of some windows, and the rows that each window uses.

    - `sizes`: int32 [document, window], in the order of placement

    Returns int32 [document, window], and int64 [window].
    """
    each = np.arange(sizes.shape[1])
    free = np.full((sizes.shape[1], len(sizes) + 1), room, np.int32)
    rows, looked_at = np.zeros(sizes.shape, np.int32), 1  # the rows in use, and an empty one
    for document, size in enumerate(sizes):
        row = rows[document] = (free[:, :looked_at] >= size[:, None]).argmax(1)
        free[each, row] -= size
        looked_at = max(looked_at, int(row.max()) + 2)
    return rows, (free < room).sum(1)
