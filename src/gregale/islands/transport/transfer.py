"""A joiner's side of healing: fetches a state in chunks, each with its hash, from all peers in parallel.

Each source has `STREAMS` connections, all opened at once, so that a request finds its connection open. A connection
requests many missing chunks at a time, so that a request, not each chunk, costs a round trip. It stores a chunk if its
hash is right. At the end, slow chunks are requested from a second source. If the sources commit a new round meanwhile
and drop the old one, unchanged chunks stay.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gregale.islands.transport.client import Dial, PeerClient, PeerUnreachable, RequestRejected
from gregale.islands.transport.snapshot_store import (
    CHUNK_BYTES,
    Expected,
    StateManifest,
    bytes_of,
    choose,
    chunk_hashes,
    chunk_span,
    largest_manifest_bytes,
    leaf_hash,
    read_manifest,
)
from gregale.storage import digest

STREAMS = 2
STALL_SECONDS = 5.0
# A chunk that takes longer is requested from another source too, when no other work is left.
SLOW_SECONDS = 1.0
MIN_REQUEST_BYTES, MAX_REQUEST_BYTES = 256 << 10, 16 << 20
MAX_REQUEST_CHUNKS = 4096  # their list must fit into a request

Chunk = tuple[str, int]


class TransferFailed(Exception):
    """No source had the complete state in time; the message has one line with each source's problem."""


@dataclass(frozen=True)
class Fetched:
    """A complete state of one round, as a source has described it."""

    offer: StateManifest
    arrays: dict[str, np.ndarray]
    received_bytes: int
    settled: bool  # no round in progress at the sources would replace the state


class Fetcher:
    """Fetches the newest state of sources repeatedly: each time only the missing chunks.

    - `expected`: shape and dtype of every array; a manifest that differs is rejected before any byte is allocated
    - `held`: arrays that are here already: chunks with the right hash are not fetched
    - `dial`: as of `PeerClient`

    Connections stay open between two fetches, and a failed fetch keeps its chunks.
    """

    def __init__(
        self, token: bytes, expected: Expected, held: Mapping[str, np.ndarray] | None = None, dial: Dial | None = None
    ):
        self._token, self._expected, self._dial = token, expected, dial
        self._local = LocalArrays(dict(held or {}), {})
        self._links: dict[str, list[PeerClient]] = {}

    def fetch(self, sources: Sequence[str], timeout_seconds: float, manifest: str = "/manifest") -> Fetched:
        """Fetch the newest state. Raises TransferFailed.

        - `manifest`: path of the sources' manifest. `/manifest/settled` waits a few seconds for the end of the round
          that the sources are making

        The other sources replace one that dies, stalls, is corrupt or is cut short.
        """
        deadline, received = time.monotonic() + timeout_seconds, 0
        complaints: dict[str, str] = {}
        for source in sources:
            peers = [PeerClient(source, self._token, STALL_SECONDS, self._dial) for _ in range(STREAMS)]
            self._links.setdefault(source, peers)
        while True:
            usable = {address: self._links[address] for address in sources if address not in complaints}
            offers = ask_for_offers(usable, manifest, self._expected, complaints)
            if not offers:
                raise TransferFailed("; ".join(complaints.values()) or "there is no source")
            chosen = choose(offers)
            offer = chosen[0]
            assembly = Assembly(offer, self._expected, self._local)
            run_streams([peer for each in chosen for peer in usable[each.source]], assembly, complaints, deadline)
            self._local, received = assembly.local(), received + assembly.received_bytes
            if assembly.is_complete:
                return Fetched(offer, assembly.arrays, received, all(each.settled for each in chosen))
            if time.monotonic() >= deadline:
                raise TransferFailed("; ".join([f"not done after {timeout_seconds:g} s", *complaints.values()]))

    def close(self) -> None:
        """Close the connections."""
        for peer in (peer for peers in self._links.values() for peer in peers):
            peer.close()


def ask_for_offers(
    links: Mapping[str, Sequence[PeerClient]], manifest: str, expected: Expected, complaints: dict[str, str]
) -> list[StateManifest]:
    """Return the valid manifests of the sources; `complaints` gets a line for each other source.

    A source's first connection sends the request, while its others open.
    """
    offers: list[StateManifest] = []
    largest = largest_manifest_bytes(expected)

    def ask(peer: PeerClient) -> None:
        try:
            offers.append(read_manifest(peer.full_address, peer.request("GET", manifest, b"", largest), expected))
        except (PeerUnreachable, RequestRejected) as error:
            complaints[peer.full_address] = str(error)

    def connect(peer: PeerClient) -> None:
        with suppress(PeerUnreachable):  # its first request tries again
            peer.connect()

    jobs = [lambda peer=peers[0]: ask(peer) for peers in links.values()]
    in_threads([*jobs, *(lambda peer=peer: connect(peer) for peers in links.values() for peer in peers[1:])])
    return offers


def run_streams(peers: Sequence[PeerClient], assembly: "Assembly", complaints: dict[str, str], deadline: float) -> None:
    """Fetch until all chunks are here, no source is left, or the deadline has passed."""

    def run(peer: PeerClient) -> None:
        try:
            stream(peer, assembly, len(peers), lambda: time.monotonic() >= deadline or peer.full_address in complaints)
        except (PeerUnreachable, RequestRejected) as error:
            complaints[peer.full_address] = str(error)

    in_threads([lambda peer=peer: run(peer) for peer in peers])


def stream(peer: PeerClient, assembly: "Assembly", streams: int, is_over: Callable[[], bool]) -> None:
    """Send requests on one of `streams` connections, until no work is left for it."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while not is_over() and not assembly.is_complete:
        chunks = assembly.take(peer.full_address, streams)
        if not chunks:
            time.sleep(0.01)
            continue
        try:
            wanted = [(assembly.names[name], index) for name, index in chunks]
            if not peer.open_chunks(wanted, sum(assembly.size_of(chunk) for chunk in chunks)):
                return  # it has a newer state now: `fetch` requests manifests again
            for chunk in chunks:
                if is_over() or assembly.is_complete:
                    peer.close()
                    return
                target = buffer[: assembly.size_of(chunk)]
                peer.read_into(target)
                if not assembly.put(chunk, target):
                    raise RequestRejected(
                        f"{peer.address} sends bytes of {chunk[0]} that do not have the hash that it gave"
                    )
        finally:
            assembly.release(chunks, peer.full_address)


class LocalArrays(NamedTuple):
    """Arrays that are here, and the known chunk hashes of the complete ones."""

    arrays: dict[str, np.ndarray]
    chunks: dict[str, tuple[str, ...]]


class Assembly:
    """The arrays that are being filled, and their missing and requested chunks."""

    def __init__(self, offer: StateManifest, expected: Expected, local: LocalArrays):
        self.names = {name: leaf_hash(list(chunks)) for name, chunks in offer.chunks.items()}
        self.arrays: dict[str, np.ndarray] = {}
        self.received_bytes = 0
        self._offer = offer
        self._lock = threading.Lock()
        self._missing: list[Chunk] = []
        self._under_way: dict[Chunk, dict[str, float]] = {}
        for name, (shape, dtype) in expected.items():
            held = local.arrays.get(name)
            if held is not None and (held.shape, held.dtype) == (tuple(shape), dtype):
                self._keep(name, held, local.chunks.get(name) or tuple(chunk_hashes(held)))
            else:
                self.arrays[name] = np.empty(tuple(shape), dtype)
                self._missing += [(name, index) for index in range(len(offer.chunks[name]))]
        self._missing.reverse()  # the last is taken first
        self._left = set(self._missing)

    def _keep(self, name: str, held: np.ndarray, found: tuple[str, ...]) -> None:
        """Keep a correct array, or copy the correct chunks of another; `held` is never written to."""
        wanted = self._offer.chunks[name]
        if found == wanted:
            self.arrays[name] = held
            return
        array = self.arrays[name] = np.empty(held.shape, held.dtype)
        target = bytes_of(array)
        for index, hashed in enumerate(wanted):
            if found[index] == hashed:
                span = slice(*chunk_span(array.nbytes, index))
                target[span] = bytes_of(held)[span]
            else:
                self._missing.append((name, index))

    def local(self) -> LocalArrays:
        """Return the arrays that are here, for the next fetch."""
        incomplete = {name for name, _ in self._left}
        chunks = {name: chunks for name, chunks in self._offer.chunks.items() if name not in incomplete}
        return LocalArrays(self.arrays, chunks)

    @property
    def is_complete(self) -> bool:
        return not self._left

    def size_of(self, chunk: Chunk) -> int:
        name, index = chunk
        return min(CHUNK_BYTES, self.arrays[name].nbytes - index * CHUNK_BYTES)

    def take(self, source: str, streams: int) -> list[Chunk]:
        """Return chunks for a source to bring: an equal share for each of `streams`; [] while there is no work.

        Shares shrink towards the end, so that all streams end together.
        """
        now = time.monotonic()
        with self._lock:
            missing = sum(self.size_of(chunk) for chunk in self._missing)
            share = min(max(missing / streams, MIN_REQUEST_BYTES), MAX_REQUEST_BYTES)
            chunks, size = [], 0
            while self._missing and size < share and len(chunks) < MAX_REQUEST_CHUNKS:
                chunks.append(self._missing.pop())
                size += self.size_of(chunks[-1])
            chunks = chunks or self._slow_chunks(source, now)
            for chunk in chunks:
                self._under_way.setdefault(chunk, {})[source] = now
            return chunks

    def _slow_chunks(self, source: str, now: float) -> list[Chunk]:
        """Return the last chunk that another source has been slow to bring: it may still bring the ones before."""
        slow = [
            chunk
            for chunk, begun in self._under_way.items()
            if chunk in self._left and source not in begun and len(begun) == 1
            if now - min(begun.values()) > SLOW_SECONDS
        ]
        return slow[-1:]

    def put(self, chunk: Chunk, content: memoryview) -> bool:
        """Store a chunk; return False if it has the wrong hash."""
        name, index = chunk
        if digest(content) != self._offer.chunks[name][index]:
            return False
        with self._lock:
            if chunk in self._left:
                start = index * CHUNK_BYTES
                bytes_of(self.arrays[name])[start : start + len(content)] = content
                self._left.remove(chunk)
                self.received_bytes += len(content)
        return True

    def release(self, chunks: Sequence[Chunk], source: str) -> None:
        """Take these chunks from the source; each that is not stored is missing again."""
        with self._lock:
            for chunk in chunks:
                begun = self._under_way[chunk]
                del begun[source]
                if not begun:
                    del self._under_way[chunk]
                    if chunk in self._left:
                        self._missing.append(chunk)


def in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
