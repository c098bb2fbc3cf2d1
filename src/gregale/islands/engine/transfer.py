"""A joiner's side of healing: fetches a state from peers, in pieces, each with its hash, from all of them at once.

    fetched = fetch(sources, token, expected={"wte|0": ((1000, 64), np.dtype("float32"))}, held=own_arrays,
                    timeout_seconds=60.0, allocate=shm.empty, progress=lambda received, total: None)
    fetched.generation, fetched.round, fetched.arrays, fetched.versions, fetched.facts, fetched.received_bytes

Each source has `STREAMS` connections, each of which takes the next missing piece, receives it into memory of its own,
and puts it in its place if its hash is right. At the end, pieces that another source is slow to bring are asked for
twice. When the sources commit a new round meanwhile and let go of the old one, what has not changed is kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gregale.islands.engine.client import Peer, PeerUnreachable, Refused
from gregale.islands.engine.manifest import Expected, Offer, choose, largest_manifest_bytes, read_manifest
from gregale.islands.engine.signing import digest
from gregale.islands.engine.state import PIECE_BYTES, bytes_of, leaf_hash, piece_hashes

STREAMS = 2
STALL_SECONDS = 5.0
# A piece that is under way for so long is asked for from another source too, when nothing else is left to do.
SLOW_SECONDS = 1.0

Piece = tuple[str, int]


class TransferFailed(Exception):
    """No source had all of the state, or not in time: one line with what each of them did.

    `arrays`: what has come so far, pieces in their places and zeros elsewhere; give them as `held` to the next fetch.
    """

    def __init__(self, reason: str, arrays: dict[str, np.ndarray]):
        super().__init__(reason)
        self.arrays = arrays


@dataclass(frozen=True)
class Fetched:
    """A whole state of one round; `complaints`: one line for each source that was given up."""

    generation: int
    round: int
    arrays: dict[str, np.ndarray]
    versions: dict[str, int]
    facts: dict
    received_bytes: int
    complaints: list[str]


def fetch(
    sources: Sequence[str],
    token: bytes,
    expected: Expected,
    timeout_seconds: float,
    held: Mapping[str, np.ndarray] | None = None,
    allocate: Callable[[tuple[int, ...], np.dtype], np.ndarray] = np.zeros,
    progress: Callable[[int, int], None] = lambda received, total: None,
) -> Fetched:
    """The newest state that the sources have.

    - `expected`: shape and dtype of every array; a manifest that asks for anything else is refused before a byte is
      allocated
    - `held`: arrays that are here already, also from an interrupted fetch: what has the right hash is not fetched
    - `progress`: called with (bytes here, bytes in all) after each piece, from several threads in turn

    A source that dies, stalls, is corrupt or is cut short is replaced by the others. Raises TransferFailed.
    """
    deadline = time.monotonic() + timeout_seconds
    arrays, received = dict(held or {}), 0
    complaints: dict[str, str] = {}
    while True:
        offers = ask_for_offers([each for each in sources if each not in complaints], token, expected, complaints)
        if not offers:
            raise TransferFailed("; ".join(complaints.values()) or "there is no source", arrays)
        chosen = choose(offers)
        assembly = Assembly(chosen[0], expected, arrays, allocate, progress)
        run_streams(chosen, token, assembly, complaints, deadline)
        arrays, received = assembly.arrays, received + assembly.received_bytes
        if assembly.is_complete:
            offer = chosen[0]
            lines = list(complaints.values())
            return Fetched(offer.generation, offer.round, arrays, offer.versions, offer.facts, received, lines)
        if time.monotonic() >= deadline:
            reasons = "; ".join([f"not done after {timeout_seconds:g} s", *complaints.values()])
            raise TransferFailed(reasons, arrays)


def ask_for_offers(sources: Sequence[str], token: bytes, expected: Expected, complaints: dict[str, str]) -> list[Offer]:
    """The manifests of all sources that have a good one; `complaints` gets a line for each other."""
    offers: list[Offer] = []
    largest = largest_manifest_bytes(expected)

    def ask(source: str) -> None:
        peer = Peer(source, token, STALL_SECONDS)
        try:
            offers.append(read_manifest(source, peer.request("GET", "/manifest", b"", largest), expected))
        except (PeerUnreachable, Refused) as error:
            complaints[source] = str(error)
        finally:
            peer.close()

    in_threads([lambda source=source: ask(source) for source in sources])
    return offers


def run_streams(
    offers: list[Offer], token: bytes, assembly: Assembly, complaints: dict[str, str], deadline: float
) -> None:
    """Fetches until all is there, no source is left, or the time is over."""

    def run(source: str) -> None:
        peer = Peer(source, token, STALL_SECONDS)
        try:
            stream(peer, assembly, deadline, lambda: source in complaints)
        except (PeerUnreachable, Refused) as error:
            complaints[source] = str(error)
        finally:
            peer.close()

    in_threads([lambda source=offer.source: run(source) for offer in offers for _ in range(STREAMS)])


def stream(peer: Peer, assembly: Assembly, deadline: float, is_given_up: Callable[[], bool]) -> None:
    """One connection: piece after piece, until there is nothing left to do for it."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    while time.monotonic() < deadline and not is_given_up() and not assembly.is_complete:
        piece = assembly.take(peer.address)
        if piece is None:
            time.sleep(0.01)
            continue
        target = buffer[: assembly.size_of(piece)]
        try:
            if not peer.read_into(f"/leaf/{assembly.names[piece[0]]}", piece[1] * PIECE_BYTES, target):
                return  # it has a newer state now: whoever called asks for manifests again
            if not assembly.put(piece, target):
                raise Refused(f"{peer.address} sends bytes of {piece[0]} that do not have the hash that it gave")
        finally:
            assembly.give_back(piece, peer.address)


class Assembly:
    """The arrays that are being filled, and which pieces are missing or under way."""

    def __init__(
        self,
        offer: Offer,
        expected: Expected,
        held: Mapping[str, np.ndarray],
        allocate: Callable[[tuple[int, ...], np.dtype], np.ndarray],
        progress: Callable[[int, int], None],
    ):
        self.names = {name: leaf_hash(list(pieces)) for name, pieces in offer.pieces.items()}
        self.arrays: dict[str, np.ndarray] = {}
        self.received_bytes = 0
        self._offer, self._progress = offer, progress
        self._lock = threading.Lock()
        self._missing: list[Piece] = []
        self._under_way: dict[Piece, dict[str, float]] = {}
        for name, (shape, dtype) in expected.items():
            self._start(name, shape, dtype, held.get(name), allocate)
        self._missing.reverse()  # the last is taken first
        self._total = sum(array.nbytes for array in self.arrays.values())
        self._here = self._total - sum(self.size_of(piece) for piece in self._missing)
        self._left = set(self._missing)

    def _start(self, name: str, shape: tuple[int, ...], dtype: np.dtype, held: np.ndarray | None, allocate) -> None:
        """Keeps an array that is right, and the right pieces of one that is not; `held` is never written to."""
        wanted = self._offer.pieces[name]
        fits = held is not None and held.shape == tuple(shape) and held.dtype == dtype
        found = piece_hashes(held) if held is not None and fits else []
        if held is not None and fits and tuple(found) == wanted:
            self.arrays[name] = held
            return
        array = self.arrays[name] = allocate(tuple(shape), dtype)
        target = bytes_of(array)
        for index, hashed in enumerate(wanted):
            if held is not None and fits and found[index] == hashed:
                span = slice(index * PIECE_BYTES, (index + 1) * PIECE_BYTES)
                target[span] = bytes_of(held)[span]
            else:
                self._missing.append((name, index))

    @property
    def is_complete(self) -> bool:
        return not self._left

    def size_of(self, piece: Piece) -> int:
        name, index = piece
        return min(PIECE_BYTES, self.arrays[name].nbytes - index * PIECE_BYTES)

    def take(self, source: str) -> Piece | None:
        """A piece for a source to bring; None while there is nothing for it to do."""
        now = time.monotonic()
        with self._lock:
            piece = self._missing.pop() if self._missing else self._slow_piece(source, now)
            if piece is not None:
                self._under_way.setdefault(piece, {})[source] = now
            return piece

    def _slow_piece(self, source: str, now: float) -> Piece | None:
        for piece, begun in self._under_way.items():
            if source not in begun and len(begun) == 1 and now - min(begun.values()) > SLOW_SECONDS:
                return piece
        return None

    def put(self, piece: Piece, content: memoryview) -> bool:
        """Puts a piece in its place; False if it has the wrong hash."""
        name, index = piece
        if digest(content) != self._offer.pieces[name][index]:
            return False
        with self._lock:
            if piece in self._left:
                start = index * PIECE_BYTES
                bytes_of(self.arrays[name])[start : start + len(content)] = content
                self._left.remove(piece)
                self._here += len(content)
                self.received_bytes += len(content)
                self._progress(self._here, self._total)
        return True

    def give_back(self, piece: Piece, source: str) -> None:
        """The source has nothing to do with a piece any more: one that is not in its place is missing again."""
        with self._lock:
            begun = self._under_way[piece]
            del begun[source]
            if not begun:
                del self._under_way[piece]
                if piece in self._left:
                    self._missing.append(piece)


def in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
