"""The order by parts: examples that can be had before all of the text is encoded.

A source's parts follow from its files alone, before any is read. In each epoch they come in another order, a hash of
the seed, and `BLOCK_PARTS` of them at a time make a block: its training documents, one after the other, are cut into
windows, and these come in an order of their own. So example i depends on the blocks up to its own, and on nothing that
is known only when the last part is encoded; and which process encoded a part, and when, changes nothing.
"""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, lru_cache
from threading import RLock

import numpy as np

from gregale.data.examples import Examples, Rows, Windows, in_order, mixed
from gregale.data.late import Parts
from gregale.data.parts import TASK_BYTES
from gregale.data.sources import SourceConfig
from gregale.data.stream import Chain, DocumentStream, held_out_documents, scattered
from gregale.errors import UserError

BLOCK_PARTS = 16
BLOCKS_AT_HAND = 4
PART_FORMAT = [1, TASK_BYTES, BLOCK_PARTS]  # what the order depends on beside the files and the seed
MOST_DOCUMENTS = 1 << 32  # of a part: the numbers of the next part's documents begin behind as many


class Split:
    """A source's parts, the documents of each to train on or held out.

    A document is held out by the hash of its number, counted from n * 2^32 on in part n: it depends on nothing else.

    Args:
        name: of the source.
        parts: its parts.
        fraction: of the documents that is held out.
    """

    def __init__(self, name: str, parts: Parts, fraction: float):
        self.name, self.parts, self._fraction = name, parts, fraction
        self._wanted: Sequence[int] = ()

    def want(self, parts: Sequence[int]) -> None:
        """Says in which order training needs the parts."""
        self._wanted = parts
        self.parts.want(parts)

    @contextmanager
    def wanted_in_order(self) -> Iterator[None]:
        """While the block runs, the parts are needed in the order of the files."""
        self.parts.want(range(self.parts.count))
        try:
            yield
        finally:
            self.parts.want(self._wanted)

    def stream(self, part: int, held_out: bool) -> DocumentStream:
        """The documents of a part to train on, or those that are held out, after waiting for it."""
        documents = self.parts.documents(part)
        out = held_out_documents(len(documents.offsets) - 1, self._fraction, part * MOST_DOCUMENTS)
        return DocumentStream(documents, out if held_out else ~out)

    def whole(self, held_out: bool) -> Chain:
        """All of them, in the order of the files, after waiting for every part."""
        return Chain([self.stream(part, held_out) for part in range(self.parts.count)])


class Blocks(Sequence[Rows]):
    """The endless training examples of one source, epoch after epoch.

    Args:
        split: the source.
        sequence_length: L, tokens in an example.
        cross_documents: whether attention and loss cross from one document into the next.
        seed: of the orders; None: parts and windows come as in the files.
    """

    def __init__(self, split: Split, sequence_length: int, cross_documents: bool, seed: int | None):
        self._split, self._length, self._cross, self._seed = split, sequence_length, cross_documents, seed
        self._blocks = -(-split.parts.count // BLOCK_PARTS)
        self._ends: list[int] = []  # how many examples there are up to the end of each block, of all epochs
        self._tokens: dict[int, int] = {}  # of each part, those to train on
        self._waiting = RLock()
        self._windows = lru_cache(BLOCKS_AT_HAND)(self._make_windows)
        split.want(self._order("0", split.parts.count).tolist())

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index):
        with self._waiting:  # one thread waits for a block, and the others for that
            while not self._ends or self._ends[-1] <= index:
                self._ends.append(sum(self._ends[-1:]) + self._count(len(self._ends)))
                if len(self._ends) == self._blocks and self._ends[-1] == 0:
                    raise UserError(self._too_little())
            block = int(np.searchsorted(self._ends, index, side="right"))
            windows, order = self._windows(block)
        return windows[int(order[index - (self._ends[block] - len(windows))])]

    def _parts(self, block: int) -> list[int]:
        """The parts of a block; blocks are counted through the epochs."""
        epoch, number = divmod(block, self._blocks)
        order = self._order(str(epoch), self._split.parts.count)
        return order[number * BLOCK_PARTS : (number + 1) * BLOCK_PARTS].tolist()

    def _count(self, block: int) -> int:
        """How many windows a block has, by the lengths of its documents alone."""
        parts = self._parts(block)
        new = [part for part in parts if part not in self._tokens]
        with ThreadPoolExecutor(BLOCK_PARTS) as pool:
            self._tokens |= zip(new, pool.map(lambda part: len(self._split.stream(part, False)), new), strict=True)
        return windows_of(sum(self._tokens[part] for part in parts), self._length)

    def _make_windows(self, block: int) -> tuple[Windows, np.ndarray]:
        """A block's windows, and the order in which they come, int64 [window]."""
        chain = Chain([self._split.stream(part, held_out=False) for part in self._parts(block)])
        windows = Windows([chain], self._length, self._cross)
        epoch, number = divmod(block, self._blocks)
        return windows, self._order(f"{epoch}/{number}", len(windows))

    def _order(self, of: str, count: int) -> np.ndarray:
        """The numbers below `count` in an order that depends on the seed, the source and `of`, int64 [count]."""
        if self._seed is None:
            return np.arange(count)
        digest = hashlib.sha256(f"{self._seed}/{self._split.name}/{of}".encode()).digest()
        return np.argsort(scattered(int.from_bytes(digest[:8], "big"), count), kind="stable")

    def _too_little(self) -> str:
        return (
            f"data.sources.{self._split.name}: too little text to train on. A window takes {self._length} + 1 = "
            f"{self._length + 1} tokens; of {len(self._tokens)} parts, in blocks of {BLOCK_PARTS}, none has as many "
            "that are not held out. Shorten the sequences, give more text, or lower data.held_out."
        )


class LateExamples(Examples):
    """The held-out windows of all sources, in the order of the files; the first of them can be had before the last.

    Args:
        splits: the sources.
        sequence_length: L, tokens in an example.
        cross_documents: as in `Blocks`.
    """

    def __init__(self, splits: Sequence[Split], sequence_length: int, cross_documents: bool):
        self._splits, self.sequence_length, self._cross = splits, sequence_length, cross_documents

    def head(self, count: int | None) -> Examples:
        chains, found = [], 0
        for split in self._splits:
            streams, tokens = [], 0
            with split.wanted_in_order():
                for part in range(split.parts.count):
                    if count is not None and found + windows_of(tokens, self.sequence_length) >= count:
                        break
                    streams.append(split.stream(part, held_out=True))
                    tokens += len(streams[-1])
            found += windows_of(tokens, self.sequence_length)
            chains.append(Chain(streams))
        if found == 0:
            raise UserError(
                f"data.held_out: too little text to evaluate on. A window takes {self.sequence_length} + 1 = "
                f"{self.sequence_length + 1} tokens, and no source has as many that are held out. Shorten the "
                "sequences, give more text, raise data.held_out, or set it to 0."
            )
        streams = [chain for chain in chains if len(chain)]
        return in_order(Windows(streams, self.sequence_length, self._cross, evaluates=True))

    @cached_property
    def _dataset(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.head(None)._dataset


class WholeStreams(Mapping[str, Chain]):
    """By source, all of its tokens to train on, or all that are held out; who asks for them waits for every part."""

    def __init__(self, splits: Mapping[str, Split], held_out: bool):
        self._splits, self._held_out = splits, held_out

    def __getitem__(self, name: str) -> Chain:
        return self._splits[name].whole(self._held_out)

    def __iter__(self) -> Iterator[str]:
        return iter(self._splits)

    def __len__(self) -> int:
        return len(self._splits)


def windows_of(tokens: int, sequence_length: int) -> int:
    """How many windows of L + 1 tokens at a stride of L so many tokens have."""
    return max(0, tokens - 1) // sequence_length


def training_by_parts(
    splits: Mapping[str, Split],
    weights: Mapping[str, float],
    sequence_length: int,
    cross_documents: bool,
    seed: int | None,
) -> Examples:
    """The endless training examples: each source's in the order by parts, mixed by weight.

    It waits for the first example of each source.

    Raises:
        UserError: a source has not one window.
    """
    import grain

    blocks = {name: Blocks(split, sequence_length, cross_documents, seed) for name, split in splits.items()}
    for each in blocks.values():
        each[0]
    return Examples(
        mixed({name: grain.MapDataset.source(each) for name, each in blocks.items()}, weights), sequence_length
    )


def content_of(source: SourceConfig) -> dict:
    """What tells a source's text from another without reading it, whichever folder of whichever host it lies in."""
    identity = source.identity()
    files = [
        [path.rpartition("/")[2], size, *([] if isinstance(at, int) else [at])]
        for path, size, at in identity.get("files", [])
    ]
    return identity | ({"files": files} if files else {})
