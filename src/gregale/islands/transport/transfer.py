"""A joiner's side of healing: fetches a state in chunks, each with its hash, from all peers in parallel.

Each source has `STREAMS` connections, all opened at once, so that a request finds its connection open. A connection
requests many missing chunks at a time, so that a request, not each chunk, costs a round trip. It stores a chunk if its
hash is right. At the end, slow chunks are requested from a second source. If the sources commit a new round meanwhile
and drop the old one, unchanged chunks stay."""

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gregale.islands.transport.client import Dial, PeerClient, PeerUnreachable, RequestRejected
from gregale.storage import digest

Expected = Mapping[str, tuple[tuple[int, ...], np.dtype]]
CHUNK_BYTES = 4 << 20
HEX_DIGITS = 32
LARGEST_FACTS_BYTES = 8 << 20
# A joiner may finish a previous snapshot; after this time without a request it has gone.
LEASE_SECONDS = 10.0
FORMER_SNAPSHOTS = 2


class VersionedArray(NamedTuple):
    """One array of the state, and the round that changed it last."""

    array: np.ndarray
    version: int


@dataclass(frozen=True)
class Snapshot:
    """The state after a committed round; `facts` is small JSON that belongs to it (position in the data, ...)."""

    generation: int
    round: int
    leaves: dict[str, VersionedArray]
    facts: dict = field(default_factory=dict)


def bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def chunk_hashes(array: np.ndarray) -> list[str]:
    content = bytes_of(array)
    return [digest(content[start : start + CHUNK_BYTES]) for start in range(0, len(content), CHUNK_BYTES)]


def chunk_span(size: int, index: int) -> tuple[int, int]:
    """Return the first byte of a chunk of an array of `size` bytes, and the end of the chunk. Raises ValueError."""
    start = index * CHUNK_BYTES
    if not 0 <= start < size:
        raise ValueError(f"an array of {size} bytes has no chunk {index}")
    return start, min(start + CHUNK_BYTES, size)


def leaf_hash(chunks: list[str]) -> str:
    return digest("".join(chunks).encode())


@dataclass(eq=False)
class Served:
    """A snapshot with its manifest, its arrays by hash, and the time of the last request for it."""

    snapshot: Snapshot
    manifest: dict[str, Any]
    arrays: dict[str, np.ndarray]
    asked: float


class SnapshotStore:
    """The current snapshot, and previous ones that a joiner is still fetching."""

    def __init__(self):
        self._lock = threading.Lock()
        self._hashing = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._served: list[Served] = []
        self._hashes: dict[str, tuple[np.ndarray, list[str]]] = {}
        self._expecting = threading.Condition()
        self._expected_until = 0.0

    def expect(self, seconds: float) -> None:
        """Note that a round in progress will publish another snapshot within `seconds`; 0: no round is in progress."""
        with self._expecting:
            self._expected_until = time.monotonic() + seconds
            self._expecting.notify_all()

    def publish(self, snapshot: Snapshot) -> None:
        """Replace the snapshot. This is cheap: arrays are hashed at the first request for the manifest."""
        new = snapshot.leaves
        with self._lock:
            self._snapshot = snapshot
            self._hashes = {
                name: known for name, known in self._hashes.items() if name in new and new[name].array is known[0]
            }
            self._forget()
        self.expect(0.0)

    def manifest(self, wait_seconds: float = 0.0) -> dict[str, Any] | None:
        """Return the manifest of the newest snapshot; None before the first.

        - `wait_seconds`: the longest wait for the end of a round in progress

        Its entry `settled` is true if no round is in progress.
        """
        until = time.monotonic() + wait_seconds
        with self._expecting:
            while (now := time.monotonic()) < min(until, self._expected_until):
                self._expecting.wait(min(until, self._expected_until) - now)
            settled = now >= self._expected_until
        manifest = self._manifest()
        return None if manifest is None else manifest | {"settled": settled}

    def _manifest(self) -> dict[str, Any] | None:
        with self._hashing:
            with self._lock:
                if (snapshot := self._snapshot) is None:
                    return None
                if known := next((each for each in self._served if each.snapshot is snapshot), None):
                    known.asked = time.monotonic()
                    return known.manifest
            served = self._describe(snapshot)
            with self._lock:
                self._served.append(served)
                self._forget()
            return served.manifest

    def lend(self, names: Collection[str]) -> dict[str, np.ndarray] | None:
        """Return the arrays with these hashes; None unless the served snapshots have all of them.

        Their snapshots stay for another `LEASE_SECONDS`.
        """
        with self._lock:
            found = {}
            for name in names:
                if (holder := next((each for each in reversed(self._served) if name in each.arrays), None)) is None:
                    return None
                holder.asked = time.monotonic()
                found[name] = holder.arrays[name]
            return found

    def _forget(self) -> None:
        """Delete previous snapshots without recent requests, and the oldest if there are too many."""
        newest = [each for each in self._served if each.snapshot is self._snapshot]
        wanted = (each for each in self._served if time.monotonic() - each.asked < LEASE_SECONDS)
        self._served = [each for each in wanted if each not in newest][-FORMER_SNAPSHOTS:] + newest

    def _describe(self, snapshot: Snapshot) -> Served:
        hashes, leaves, arrays = {}, {}, {}
        for name, leaf in snapshot.leaves.items():
            array, chunks = self._hashes.get(name, (None, []))
            if array is not leaf.array:
                chunks = chunk_hashes(leaf.array)
            hashes[name] = leaf.array, chunks
            hashed = leaf_hash(chunks)
            arrays[hashed] = leaf.array
            leaves[name] = {
                "dtype": leaf.array.dtype.name,
                "shape": list(leaf.array.shape),
                "version": leaf.version,
                "bytes": leaf.array.nbytes,
                "hash": hashed,
                "pieces": chunks,
            }
        self._hashes = hashes
        manifest = {
            "generation": snapshot.generation,
            "round": snapshot.round,
            "piece_bytes": CHUNK_BYTES,
            "leaves": leaves,
            "facts": snapshot.facts,
        }
        return Served(snapshot, manifest, arrays, time.monotonic())


@dataclass(frozen=True)
class StateManifest:
    """A source's manifest that matches the expected arrays; `chunks`: chunk hashes by name of the array."""

    source: str
    generation: int
    round: int
    versions: dict[str, int]
    chunks: dict[str, tuple[str, ...]]
    facts: dict
    settled: bool  # no round in progress would replace this state

    @property
    def content(self) -> str:
        """A hash that is equal for sources with bitwise equal states."""
        return leaf_hash([leaf_hash(list(self.chunks[name])) for name in sorted(self.chunks)])


def chunk_count(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.ceil(math.prod(shape) * dtype.itemsize / CHUNK_BYTES)


def largest_manifest_bytes(expected: Expected) -> int:
    """Return an upper limit of the size of a manifest with the expected arrays."""
    leaves = sum(
        400 + 6 * len(name) + 24 * len(shape) + (HEX_DIGITS + 3) * chunk_count(shape, dtype)
        for name, (shape, dtype) in expected.items()
    )
    return leaves + LARGEST_FACTS_BYTES


def read_manifest(source: str, manifest: dict, expected: Expected) -> StateManifest:
    """Return a source's manifest; raise RequestRejected with one line if it is invalid."""
    try:
        leaves = manifest["leaves"]
        if manifest["piece_bytes"] != CHUNK_BYTES:
            raise RequestRejected(f"{source} cuts its state into other chunks: it has another version of Gregale")
        for name in sorted(set(leaves) ^ set(expected)):
            whose = "offers an array that is not expected here" if name in leaves else "does not have"
            raise RequestRejected(f"{source} {whose}: {name[:200]}")
        for name, (shape, dtype) in expected.items():
            check_leaf(f"{source} offers {name}", leaves[name], shape, dtype)
        return StateManifest(
            source,
            integer(manifest["generation"]),
            integer(manifest["round"]),
            {name: integer(leaf["version"]) for name, leaf in leaves.items()},
            {name: tuple(leaf["pieces"]) for name, leaf in leaves.items()},
            dict(manifest["facts"]),
            bool(manifest["settled"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestRejected(f"{source} sends an invalid manifest ({type(error).__name__}: {error})") from None


def check_leaf(what: str, leaf: dict, shape: tuple[int, ...], dtype: np.dtype) -> None:
    offered = leaf["dtype"], tuple(leaf["shape"]), leaf["bytes"]
    size = math.prod(shape) * dtype.itemsize
    if offered != (dtype.name, tuple(shape), size):
        found = f"{offered[0]}{list(offered[1])} of {offered[2]} bytes"
        raise RequestRejected(f"{what} as {found[:200]}; here it is {dtype.name}{list(shape)} of {size} bytes")
    chunks = leaf["pieces"]
    if len(chunks) != chunk_count(shape, dtype) or leaf["hash"] != leaf_hash(chunks):
        raise RequestRejected(f"{what} with hashes that do not belong together")


def integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no integer")
    return value


def choose(offers: list[StateManifest]) -> list[StateManifest]:
    """Return the manifests of the newest state; if they differ, the larger group (tie: the smaller hash)."""
    newest = max((offer.generation, offer.round) for offer in offers)
    groups: dict[str, list[StateManifest]] = {}
    for offer in offers:
        if (offer.generation, offer.round) == newest:
            groups.setdefault(offer.content, []).append(offer)
    return max(sorted(groups.items()), key=lambda group: len(group[1]))[1]


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
            assembly = Assembly(chosen[0], self._expected, self._local)
            run_streams([peer for each in chosen for peer in usable[each.source]], assembly, complaints, deadline)
            self._local, received = assembly.local(), received + assembly.received_bytes
            if assembly.is_complete:
                return Fetched(chosen[0], assembly.arrays, received, all(each.settled for each in chosen))
            if time.monotonic() >= deadline:
                raise TransferFailed("; ".join([f"not done after {timeout_seconds:g} s", *complaints.values()]))

    def close(self) -> None:
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
    arrays: dict[str, np.ndarray]
    chunks: dict[str, tuple[str, ...]]


class Assembly:
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
