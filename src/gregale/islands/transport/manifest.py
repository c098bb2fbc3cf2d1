"""The manifest of a source's state, checked against the expected arrays before anything is allocated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gregale.islands.transport.client import RequestRejected
from gregale.islands.transport.snapshot_store import CHUNK_BYTES, leaf_hash

Expected = Mapping[str, tuple[tuple[int, ...], np.dtype]]
HEX_DIGITS = 32
LARGEST_FACTS_BYTES = 8 << 20


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
