"""The rows of training: documents are split off for evaluation, packed in windows, shuffled and made examples.

A document of n tokens has n - 1 targets and takes as many places of a row: its last token is no input. So a row of L
places holds a document of at most L + 1 tokens, or several whose targets are at most L. A document of one token has no
target and is in no row.

A stream of documents is cut into windows of L + 1 tokens at a stride of L. So every token but the first of the stream
is a target exactly once; the remainder at the end that does not fill a window is left out. Or whole documents are
packed into rows (`gregale.data.examples`). The rows of each source are shuffled separately and anew in each epoch; then
the sources are mixed by weight. `grain` does both by arithmetic on the index, so any example is available without the
earlier ones. (Grain imports JAX. It is imported only where it is used, because the tokenizing processes and `--help`
work without it.)
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gregale.data.sources.base import CONCAT, FIT, KEEP_END, PLACES_SHOWN, REFUSE
from gregale.data.store import LossMask, TokenStore
from gregale.data.tokenizers import ByteCountOverrides, Tokenizer
from gregale.errors import UserError

if TYPE_CHECKING:
    import grain


class InMemory(NamedTuple):
    """Tokens of documents in memory, as a `TokenStore` has them in files."""

    tokens: np.ndarray
    offsets: np.ndarray
    corrections: ByteCountOverrides
    supervised: LossMask | None = None


class DocumentStream:
    """Selected documents of a store, optionally only their tokens between two indices, concatenated in order.

    - `store`: holds the tokens; nothing is copied.
    - `chosen`: bool [document], whether the stream has a document.
    - `start`: the first of the store's tokens that the stream may have.
    - `stop`: the end of those tokens; by default the end of the store.

    - `starts`: int64 [chosen document + 1], the index of each document in the stream, and the end of the last.
    - `numbers`: int64 [chosen document], the index of each document in the store.
    """

    def __init__(self, store: TokenStore | InMemory, chosen: np.ndarray, start: int = 0, stop: int | None = None):
        offsets = store.offsets.clip(start, stop)
        self.numbers = numbers = np.flatnonzero(chosen & (np.diff(offsets) > 0))
        lengths = offsets[numbers + 1] - offsets[numbers]
        self.starts = np.concatenate([[0], lengths]).cumsum(dtype=np.int64)
        self._shifts = offsets[numbers] - self.starts[:-1]  # from index in the stream to index in the store
        self._tokens, self._corrections, self._supervised = store.tokens, store.corrections, store.supervised

    def __len__(self) -> int:
        """Return the number of tokens in the stream, end-of-document tokens included."""
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens from `start` to `stop`, int32 [token], and each one's document index, int64 [token]."""
        indices, documents = self._indices(start, stop)
        return self._tokens[indices].astype(np.int32), documents

    def more_bytes(self, start: int, stop: int) -> np.ndarray:
        """Return the bytes of text of each token beyond its vocabulary entry, int64 [token]."""
        return self._corrections.at(self._indices(start, stop)[0])

    @property
    def has_masks(self) -> bool:
        """Return whether the loss is on some of the tokens only."""
        return self._supervised is not None

    def supervised(self, start: int, stop: int) -> np.ndarray:
        """Return whether the loss is on each token, bool [token]."""
        if self._supervised is None:
            return np.ones(stop - start, bool)
        return self._supervised.at(self._indices(start, stop)[0])

    def tokens_at(self, places: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return the tokens at some indices of the stream, which are in these documents, int32 [index]."""
        return self._tokens[places + self._shifts[documents]].astype(np.int32)

    def more_bytes_at(self, places: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return `more_bytes` at some indices of the stream, which are in these documents, int64 [index]."""
        return self._corrections.at(places + self._shifts[documents])

    def supervised_at(self, places: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return `supervised` at some indices of the stream, which are in these documents, bool [index]."""
        if self._supervised is None:
            return np.ones(len(places), bool)
        return self._supervised.at(places + self._shifts[documents])

    def supervised_in(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return the number of tokens with loss between two indices in each document, int64 [document]."""
        if self._supervised is None:
            return stops - starts
        return self._supervised.before(stops + self._shifts) - self._supervised.before(starts + self._shifts)

    def _indices(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return each token's index in the store, and the index of its document."""
        first = np.searchsorted(self.starts, start, side="right") - 1
        last = np.searchsorted(self.starts, stop, side="left")
        counts = np.diff(self.starts[first : last + 1].clip(start, stop))
        documents = np.repeat(np.arange(first, last), counts)
        return np.arange(start, stop) + self._shifts[documents], documents


def stream_of(texts: Sequence[str], tokenizer: Tokenizer) -> DocumentStream:
    """Return the stream of texts in memory, at least one, each a document with the token that ends it."""
    found = [
        (np.append(ids, tokenizer.end_of_document), np.append(more, 0)) for ids, more in tokenizer.encode_counted(texts)
    ]
    tokens, more = (np.concatenate(parts) for parts in zip(*found, strict=True))
    offsets = np.array([0, *(len(ids) for ids, _ in found)], np.int64).cumsum()
    return DocumentStream(InMemory(tokens, offsets, ByteCountOverrides.of(more)), np.ones(len(texts), bool))


def held_out_documents(count: int, fraction: float) -> np.ndarray:
    """Return whether each document of a source is held out, bool [document].

    A document is held out when a hash of its number (splitmix64) lies in the lowest `fraction` of all 64-bit numbers.
    So the choice is the same on every machine and for every tokenizer. Documents added at the end of a source do not
    change the choice for earlier documents.
    """
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed.astype(np.float64) < fraction * 2.0**64


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
            f"too little text to evaluate on. {rows.needs}, and there are {len(rows.stream)}. Give more text, train "
            "with shorter sequences, or score windows of any length (`gregale eval --stride`)."
        )
    return in_order([rows])


def in_order(parts: Sequence[Rows]) -> Examples:
    """Return every row of some streams once, in order."""
    import grain

    datasets = [grain.MapDataset.source(rows) for rows in parts if len(rows)]
    return Examples(grain.MapDataset.concatenate(datasets), parts[0].sequence_length, parts[0].rows_together)


END_WINDOWS = 2  # the minimum of an end, if the source is long enough


class End(NamedTuple):
    """A held-out end, described by the text, so that it is the same for every tokenizer."""

    document: int  # the index of the first document that the end reaches into
    size_bytes: int  # the UTF-8 bytes of that document that belong to the end


class Split(NamedTuple):
    """A source's training tokens and held-out tokens; no token is in both."""

    train: DocumentStream
    held_out: DocumentStream


def split_at(store: TokenStore, fraction: float, cut: int | None, together: int = 1) -> Split:
    """Return a split by the hash of the documents' numbers; or, with a cut, hold out all tokens from the cut on.

    - `together`: adjacent documents that stay together: 2 for pairs, which the hash counts
    """
    count = len(store.offsets) - 1
    if cut is None:
        out = np.repeat(held_out_documents(count // together, fraction), together)
        return Split(DocumentStream(store, ~out), DocumentStream(store, out))
    everything = np.ones(count, bool)
    return Split(DocumentStream(store, everything, stop=cut), DocumentStream(store, everything, start=cut))


def end_cut(
    store: TokenStore, fraction: float, sequence_length: int, packing: str = CONCAT, together: int = 1
) -> int | None:
    """Return the index at which the held-out end of a source begins, or None if whole documents are held out.

    Whole documents are held out if they fill a window of L + 1 tokens and leave one to train on. Otherwise, with N
    tokens, the last k L + 1 are held out, for k = max(2, round(fraction N / L)), or fewer so that a training window
    remains: k windows at a stride of L, none of whose tokens is ever trained on. A source too short for k = 1 has no
    end. L is `sequence_length`; a fraction of 0 holds out nothing.

    A packing that does not cut documents needs one to train on and one that is held out. Otherwise the last
    max(1, round(fraction D)) of D documents are held out; of a single document nothing is. D counts pairs, if documents
    stay `together`.
    """
    documents = split_at(store, fraction, None, together)
    if packing != CONCAT:
        count = (len(store.offsets) - 1) // together
        if fraction == 0 or count < 2 or all(len(stream.numbers) for stream in documents):
            return None
        return int(store.offsets[-1 - together * min(count - 1, max(1, round(fraction * count)))])
    if fraction == 0 or all(window_count(stream, sequence_length) for stream in documents):
        return None
    tokens = int(store.offsets[-1])
    most = (tokens - 2) // sequence_length - 1
    windows = min(max(END_WINDOWS, round(fraction * tokens / sequence_length)), most)
    return tokens - windows * sequence_length - 1 if windows > 0 else None


def end_of(store: TokenStore, cut: int, tokenizer: Tokenizer) -> End:
    """Return the end from a cut on, described by the text."""
    document = int(np.searchsorted(store.offsets, cut, side="right")) - 1
    return End(document, int(tokenizer.token_bytes[store.tokens[cut : store.offsets[document + 1]]].sum()))


def cut_of(store: TokenStore, end: End, tokenizer: Tokenizer) -> int:
    """Return the index of an end in a store of the same text by another tokenizer: its first whole token."""
    start, stop = store.offsets[end.document], store.offsets[end.document + 1]
    start = max(start, stop - end.size_bytes - 1)  # every token except the end of the document has at least one byte
    behind = tokenizer.token_bytes[store.tokens[start:stop][::-1]].cumsum()
    return int(stop - np.searchsorted(behind, end.size_bytes, side="right"))
