"""A source's parts while they are still being encoded: what is asked for is waited for."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from threading import Event, Thread
from typing import Protocol, TypeVar

import numpy as np

from gregale.data.build import Cache, NamedSource, is_complete, locked, sharing, skipped_in, store_key
from gregale.data.parts import LENGTH, PIECE_BYTES, Damaged, Seal, make_tasks, read_part, token_dtype
from gregale.data.progress import Report
from gregale.data.remote_store import PartFiles, PartTokens, parts_of
from gregale.data.share import Share
from gregale.data.sources import Skipped
from gregale.data.store import TokenStore, open_store
from gregale.data.text_bytes import NONE, Corrections
from gregale.data.tokenizers import Tokenizer
from gregale.errors import UserError
from gregale.storage import Place, Remote

T = TypeVar("T")

POLL_SECONDS, STORE_POLL_SECONDS = 0.1, 1.0
PIECES_AT_HAND = 256  # in memory: those of some sixteen parts


@dataclass(frozen=True)
class PartDocuments:
    """The documents of one part; see `gregale.data.stream.Documents`."""

    tokens: np.ndarray | PartTokens
    offsets: np.ndarray
    corrections: Corrections


class Parts(Protocol):
    """The parts of a source: how many there are is known from its files, what they hold when they are encoded."""

    count: int

    def documents(self, number: int) -> PartDocuments:
        """The documents of a part, after waiting for it."""
        ...

    def want(self, numbers: Iterable[int]) -> None:
        """Says which parts are needed first."""

    def check(self, label: str, report: Report) -> Skipped:
        """Reads every byte of every part, after waiting for it; returns what could not be read of the source."""
        ...

    def close(self) -> None:
        """Ends what works in the background."""


class DoneParts:
    """The parts of a store that is complete, on a disk."""

    def __init__(self, store: TokenStore):
        if "parts" not in store.manifest:
            raise UserError(
                f"{store.folder} does not say where its parts begin: another version of Gregale built it. Delete the "
                "folder, and it is built again; or leave data.order as it was."
            )
        self.store = store
        self._firsts = np.concatenate([[0], store.manifest["parts"]]).cumsum(dtype=np.int64)
        self.count = len(self._firsts) - 1

    def documents(self, number: int) -> PartDocuments:
        offsets = self.store.offsets[self._firsts[number] : self._firsts[number + 1] + 1]
        corrections = self.store.corrections.between(offsets[0], offsets[-1])
        return PartDocuments(self.store.tokens[offsets[0] : offsets[-1]], offsets - offsets[0], corrections)

    def want(self, numbers: Iterable[int]) -> None:
        """Nothing: all are there."""

    def check(self, label: str, report: Report) -> Skipped:
        self.store.verify(label, report)
        return skipped_in(self.store)

    def close(self) -> None:
        """Nothing works in the background."""


class LateParts:
    """The parts of a source that this process, and maybe others, encode in the background.

    Args:
        source: the source and its name.
        tokenizer: encodes its text.
        folder: of the store that the parts would make.
        cache: where that lies.
        workers: most processes to use.
        report: told the bytes of input encoded so far.
    """

    def __init__(
        self, source: NamedSource, tokenizer: Tokenizer, folder: Place, cache: Cache, workers: int, report: Report
    ):
        self._sizes = [task.size_bytes for task in make_tasks(source.config)]
        self.count = len(self._sizes)
        self._files = PartFiles(parts_of(folder), cache.disk if isinstance(folder, Remote) else None)
        self._dtype = token_dtype(tokenizer.vocabulary_size).newbyteorder("<")
        self._piece = lru_cache(PIECES_AT_HAND)(self._files.piece)
        self._poll_seconds = STORE_POLL_SECONDS if isinstance(folder, Remote) else POLL_SECONDS
        self._share: Share | None = None
        self._failure: BaseException | None = None
        self._wanted: tuple[int, ...] = ()
        self._over = Event()
        self._thread = Thread(target=self._work, args=(source, tokenizer, folder, workers, report), daemon=True)
        self._thread.start()

    def documents(self, number: int) -> PartDocuments:
        return self._patiently(number, lambda: self._documents(number))

    def want(self, numbers: Iterable[int]) -> None:
        self._wanted = tuple(numbers)
        if self._share is not None:
            self._share.want(self._wanted)

    def check(self, label: str, report: Report) -> Skipped:
        found, done = Skipped(), 0
        for number in range(self.count):
            found.add(Skipped(**self._patiently(number, lambda number=number: self._checked(number)).skipped))
            done += self._sizes[number]
            report(label, done, sum(self._sizes))
        return found

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _documents(self, number: int) -> PartDocuments:
        seal = self._files.seal(number)
        start = seal.tokens * seal.itemsize
        first = start // PIECE_BYTES
        rest = b"".join(self._piece(number, piece) for piece in range(first, len(seal.pieces)))
        lengths = np.frombuffer(rest[start - first * PIECE_BYTES :], LENGTH)
        offsets = np.concatenate([[0], lengths]).cumsum(dtype=np.int64)
        bounds = np.array([0, seal.tokens])
        tokens = PartTokens(bounds, self._dtype, lambda _, piece: self._sound(number, piece))
        return PartDocuments(tokens, offsets, Corrections.unpacked(seal.corrections) if seal.corrections else NONE)

    def _checked(self, number: int) -> Seal:
        seal = self._files.seal(number)
        for _ in read_part(self._files.folder, number, seal):
            pass
        return seal

    def _sound(self, number: int, piece: int) -> bytes:
        return self._patiently(number, lambda: self._piece(number, piece))

    def _patiently(self, number: int, read: Callable[[], T]) -> T:
        """What is read of a part, after waiting for it; it is encoded again if it is damaged."""
        while True:
            while not self._is_sealed(number):
                if self._failure is not None:
                    raise self._failure
                time.sleep(self._poll_seconds)
            try:
                return read()
            except Damaged:
                self._files.forget(number)
                if self._share is not None:
                    self._share.again(number)

    def _is_sealed(self, number: int) -> bool:
        try:
            self._files.seal(number)
        except Damaged:
            return False
        return True

    def _work(self, source: NamedSource, tokenizer: Tokenizer, folder: Place, workers: int, report: Report) -> None:
        try:
            with sharing(source, tokenizer, folder, workers, report, reads=True) as self._share:
                self._share.want(self._wanted)
                while not self._over.is_set():
                    self._share.encode(self._over.is_set)
                    self._over.wait(
                        self._poll_seconds
                    )  # it stays one of the builders: who builds the store keeps the parts
        except BaseException as error:
            self._failure = error


def open_parts(source: NamedSource, tokenizer: Tokenizer, cache: Cache, workers: int, report: Report) -> Parts:
    """The parts of a source: those of its store if there is one on a disk, else those that are, or will be, encoded."""
    folder = cache.place / store_key(source.config, tokenizer)
    if isinstance(folder, Remote) or not is_complete(folder):
        return LateParts(source, tokenizer, folder, cache, workers, report)
    with locked(folder.with_suffix(".lock")):
        store = open_store(folder)
        store.verify_once(f"checking {source.name}", report)
    return DoneParts(store)
