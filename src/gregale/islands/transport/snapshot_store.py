"""The snapshots of the state that a server serves, and their manifests: bytes by hash. Nothing is copied.

The state is cut into chunks of `CHUNK_BYTES`, each with its hash, so that a joiner can check and place every chunk
separately, from any source. A leaf's name on the wire is the hash of its chunks' hashes. A joiner checks a manifest
against the arrays that it expects before anything is allocated.
"""

import math
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gregale.islands.transport.client import RequestRejected
from gregale.storage import digest

Expected = Mapping[str, tuple[tuple[int, ...], np.dtype]]
CHUNK_BYTES = 4 << 20
HEX_DIGITS = 32
LARGEST_FACTS_BYTES = 8 << 20
# A joiner may finish a previous snapshot; after this time without a request it has gone.
LEASE_SECONDS = 10.0
FORMER_SNAPSHOTS = 2


@dataclass(frozen=True)
class ServedArray:
    """One array of the state, and the round that changed it last."""

    array: np.ndarray
    version: int


@dataclass(frozen=True)
class Snapshot:
    """The state after a committed round; `facts` is small JSON that belongs to it (position in the data, ...)."""

    generation: int
    round: int
    leaves: dict[str, ServedArray]
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


@dataclass
class Served:
    """A snapshot with its manifest, and the time of the last request for it."""

    manifest: dict[str, Any]
    arrays: dict[str, np.ndarray]
    asked: float


class SnapshotStore:
    """The current snapshot, and previous ones that a joiner is still fetching."""

    def __init__(self):
        self._lock = threading.Lock()
        self._hashing = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._served: list[tuple[Snapshot, Served]] = []
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
                snapshot = self._snapshot
                for known, served in self._served:
                    if known is snapshot:
                        served.asked = time.monotonic()
                        return served.manifest
            if snapshot is None:
                return None
            served = self._describe(snapshot)
            with self._lock:
                self._served.append((snapshot, served))
                self._forget()
            return served.manifest

    def lend(self, names: Collection[str]) -> dict[str, np.ndarray] | None:
        """Return the arrays with these hashes; None unless the served snapshots have all of them.

        Their snapshots stay for another `LEASE_SECONDS`.
        """
        with self._lock:
            found = {}
            for name in names:
                holder = next((served for _, served in reversed(self._served) if name in served.arrays), None)
                if holder is None:
                    return None
                holder.asked = time.monotonic()
                found[name] = holder.arrays[name]
            return found

    def _forget(self) -> None:
        """Delete previous snapshots without recent requests, and the oldest if there are too many."""
        former = [
            (snapshot, served)
            for snapshot, served in self._served
            if snapshot is not self._snapshot and time.monotonic() - served.asked < LEASE_SECONDS
        ]
        newest = [pair for pair in self._served if pair[0] is self._snapshot]
        self._served = former[-FORMER_SNAPSHOTS:] + newest

    def _describe(self, snapshot: Snapshot) -> Served:
        known, hashes = self._hashes, {}
        leaves, arrays = {}, {}
        for name, leaf in snapshot.leaves.items():
            array, chunks = known.get(name, (None, []))
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
        return Served(manifest, arrays, time.monotonic())


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
