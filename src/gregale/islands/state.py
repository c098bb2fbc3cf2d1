"""What an island keeps besides its steps: checkpoints of the outer state, the inner optimizer for a joining island,
data leases, and the rounds at which stages begin.

The outer state has one folder for each round, beside the checkpoints of the inner state, on a disk or in an object
store. `round-00000012` has the concatenated arrays, cut into files of 48 MiB
(`1f2e3d4c-00000`, ...), and `manifest.json` with their shapes and hashes. The file names are random. The manifest is
written last, atomically, and names the files: so a folder without a manifest is not a checkpoint. It has the number of
its format, and the format before is read too.

A joining island without an inner optimizer takes over a peer's, with its buffers. So its learning rate is that of the
fleet, and its first steps do not come from an optimizer with empty moments.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from math import prod
from threading import Lock
from typing import Any, NamedTuple
from uuid import uuid4

import jax
import numpy as np
from jax.sharding import NamedSharding

from gregale.atomic_files import os_error_text
from gregale.checkpoint import files
from gregale.checkpoint.manifest import MANIFEST, read_manifest
from gregale.checkpoint.store import delete
from gregale.data.mixtures import MixtureHistory, with_mixture
from gregale.errors import UserError
from gregale.islands.method import Island
from gregale.islands.outer import NO_OWN_LEAVES, HostOuter, OwnLeaves
from gregale.islands.protocol.ledger import Lease, Ledger
from gregale.islands.protocol.messages import OuterRecord
from gregale.islands.shards import keys_here, on_devices, shards_here
from gregale.islands.transport.transfer import VersionedArray
from gregale.methods.method import PsdpState
from gregale.runs.config import TrainConfig
from gregale.storage import StoragePath, StoreError, digest, names, parallel_map, write_bytes

_THREADS = 4  # arrays read in parallel
_FORMAT = 1  # of a manifest, with an `OuterRecord`; 0 is the same without a number


class SavedOuterState(NamedTuple):
    outer: OuterRecord
    arrays: dict[str, np.ndarray]
    versions: dict[str, int]
    own: OwnLeaves


def folder_of(directory: StoragePath, number: int) -> StoragePath:
    return directory / f"round-{number:08d}"


def write_outer(
    directory: StoragePath, outer: OuterRecord, leaves: Mapping[str, VersionedArray], own: OwnLeaves = NO_OWN_LEAVES
) -> None:
    """Write the outer state of a round atomically; do nothing if it exists.

    Raises OSError or `StoreError`. The outer state of another generation for the same round stays until this one is
    complete.
    """
    folder = folder_of(directory, outer.round)
    if _is_of(folder, outer):
        return
    name_of_parts, part_bytes = uuid4().hex[:8], files.PART_BYTES
    whole = {**leaves, **{name: VersionedArray(array, 0) for name, array in own.arrays.items()}}
    entries: list[list[Any]] = []

    def contents() -> Iterator[np.ndarray]:
        for name, held in whole.items():
            array = np.asarray(held.array)
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            entries.append([name, array.dtype.name, list(array.shape), held.version, digest(content.data)])
            yield content

    folder.mkdir(parents=True, exist_ok=True)
    try:
        files.write_parts(folder, name_of_parts, contents(), part_bytes)
        groups = {str(index): group for index, group in own.groups.items()}
        manifest = {"outer": outer.to_json(), "parts": name_of_parts, "part_bytes": part_bytes, "arrays": entries}
        manifest |= {"own": sorted(own.arrays), "groups": groups, "format": _FORMAT}
        write_bytes(folder / MANIFEST, json.dumps(manifest).encode())
    except (OSError, StoreError):
        _remove(folder, lambda name: name.startswith(name_of_parts))
        raise
    _remove(folder, lambda name: name != MANIFEST and not name.startswith(name_of_parts))


def read_outer(directory: StoragePath, number: int) -> SavedOuterState:
    """Read the outer state of a round.

    Raises `UserError` if it is missing, damaged or of an unknown format, and `StoreError`.
    """
    folder = folder_of(directory, number)
    try:
        manifest = _manifest(folder)
        outer = OuterRecord.from_json(manifest["outer"])
        name_of_parts, part_bytes = manifest["parts"], manifest["part_bytes"]
        kinds = [(np.dtype(dtype), tuple(shape)) for _, dtype, shape, *_ in manifest["arrays"]]
        starts = accumulate((dtype.itemsize * prod(shape) for dtype, shape in kinds), initial=0)
        read_array = partial(_array, folder, name_of_parts, part_bytes)
        found = parallel_map(read_array, manifest["arrays"], kinds, starts, threads=_THREADS)
        arrays = {entry[0]: array for entry, array in zip(manifest["arrays"], found, strict=True)}
        own = OwnLeaves(
            {name: arrays.pop(name) for name in manifest["own"]},
            {int(index): group for index, group in manifest["groups"].items()},
        )
        return SavedOuterState(
            outer, arrays, {entry[0]: entry[3] for entry in manifest["arrays"] if entry[0] in arrays}, own
        )
    except UserError:  # of the format, or of a store that may be reachable again later: a fresh start would not help
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = os_error_text(error) if isinstance(error, OSError) else str(error)
        raise UserError(
            f"The outer parameters in {folder} cannot be read ({why}). Without them this island can go on only with "
            f"those of its peers: give --fresh, and it joins them anew."
        ) from error


def keep_rounds(directory: StoragePath, numbers: Iterable[int]) -> None:
    kept = {folder_of(directory, number).name for number in numbers}
    for name in names(directory):
        if name.startswith("round-") and name not in kept:
            with suppress(OSError, StoreError):
                delete(directory / name)


def _array(folder: StoragePath, own: str, part_bytes: int, entry: list[Any], kind: tuple, start: int) -> np.ndarray:
    """Read an array that begins at byte `start` of the parts. Raises ValueError if its hash is wrong."""
    dtype, shape = kind
    content = np.empty(dtype.itemsize * prod(shape), np.uint8)
    files.read_parts(content, folder, own, part_bytes, start)
    if digest(content.data) != entry[4]:
        raise ValueError(f"{entry[0]} is not what was written")
    return content.view(dtype).reshape(shape)


def _manifest(folder: StoragePath) -> dict[str, Any]:
    """Return a folder's manifest in this version's format. Raises as `read_outer`, or what JSON and the store raise."""
    manifest = dict(read_manifest(folder))
    if (found := manifest.get("format", 0)) not in (_FORMAT - 1, _FORMAT):
        raise UserError(
            f"The outer parameters in {folder} have format {found}; this version of Gregale reads {_FORMAT - 1} and "
            f"{_FORMAT}. Start this island with the version that saved them, or with --fresh: it joins its peers anew."
        )
    return manifest


def _is_of(folder: StoragePath, outer: OuterRecord) -> bool:
    """Return whether a folder has the outer state of this record."""
    try:
        return OuterRecord.from_json(read_manifest(folder)["outer"]) == outer
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remove(folder: StoragePath, chosen: Callable[[str], bool]) -> None:
    with suppress(OSError, StoreError):
        for name in filter(chosen, names(folder)):
            (folder / name).unlink(missing_ok=True)


Expected = dict[str, tuple[tuple[int, ...], np.dtype]]


class InnerOptimizerState(NamedTuple):
    """A peer's inner optimizer after `step` inner steps, by shard key."""

    step: int
    arrays: dict[str, np.ndarray]


def on_host(state: PsdpState) -> dict[str, np.ndarray]:
    """Return this host's shards of a state's optimizer and buffers, by key; wait for the device."""
    found = {}
    for path, array in _arrays(state).items():
        found |= {key: np.array(shard) for key, shard in shards_here(path, array).items()}
    return found


def expected(state: PsdpState) -> Expected:
    """Return the shape and dtype of each array of `on_host`."""
    found = {}
    for path, array in _arrays(state).items():
        place = array.sharding
        assert isinstance(place, NamedSharding)
        shard = place.shard_shape(array.shape)
        found |= {key: (shard, np.dtype(array.dtype)) for key in keys_here(path, array.shape, place)}
    return found


def taken_over(state: PsdpState, arrays: Mapping[str, np.ndarray]) -> PsdpState:
    """Return the state with optimizer and buffers made of the shards `arrays`, and unchanged parameters."""
    own = _arrays(state)
    places = {path: array.sharding for path, array in own.items()}
    new = [on_devices(arrays, path, own[path].shape, place) for path, place in places.items()]  # pyright: ignore
    sharded, gathered, buffers = jax.tree.unflatten(jax.tree.structure(_parts(state)), new)
    return state._replace(sharded=sharded, gathered=gathered, buffers=buffers)


def _arrays(state: PsdpState) -> dict[str, jax.Array]:
    """Return the arrays of the optimizer and the buffers by path, in leaf order."""
    leaves = jax.tree_util.tree_flatten_with_path(_parts(state))[0]
    return {f"inner/{jax.tree_util.keystr(path, simple=True, separator='.')}": array for path, array in leaves}


def _parts(state: PsdpState) -> tuple:
    return state.sharded, state.gathered, state.buffers


class DataLeases:
    """The leases of one island. Threads that build batches take examples; committed rounds add examples.

    - `name`, `holder`: the key of the lease in the ledger
    - `batch`: the number of examples in a batch; a lease is a whole number of batches unless the batch size has changed
    - `used`: the number of examples that the holder has already trained on in this stage
    - `stage`: the number of the stage of the run, from 0; leases of other stages are not used
    """

    def __init__(self, name: str, holder: str, batch: int, used: int = 0, stage: int = 0):
        self.name, self.holder, self._batch, self._stage = name, holder, batch, stage
        self._lease: Lease | None = None
        self._newest: tuple[Ledger, str] = Ledger(), holder
        self._taken = self._used = used
        self._counted, self._later = 0, deque[int]()  # the batches in `_used`; the examples used after each later one
        self._lock = Lock()

    def update(self, ledger: Ledger, holder: str) -> None:
        """Use the ledger of the newest round; in a later stage than this island's it keeps its lease until then."""
        with self._lock:
            self._newest = ledger, holder
            if len(ledger.stages) == self._stage:
                self.holder, self._lease = holder, ledger.lease(self.name, holder)

    def begin_stage(self, stage: int, batch: int) -> None:
        """Use the leases of another stage from now on, in batches of this size, and count from 0."""
        with self._lock:
            self._stage, self._batch, self._lease = stage, batch, None
            self._taken = self._used = self._counted = 0
            self._later.clear()
        self.update(*self._newest)

    def take(self) -> int | None:
        with self._lock:
            while self._lease is not None and (spans := self._lease.after(self._taken).spans):
                start, stop = spans[0]
                if stop - start < self._batch:  # left over from another batch size: too short for a batch
                    self._taken += stop - start
                    continue
                self._taken += self._batch
                self._later.append(self._taken)
                return start
            return None

    def is_empty(self) -> bool:
        with self._lock:
            return self._lease is None or not self._lease.after(self._taken).spans

    def used_after(self, batches: int) -> int:
        """Return the number of examples used by the holder after this process's first `batches` batches.

        `batches` never decreases.
        """
        with self._lock:
            while self._counted < batches:
                self._counted, self._used = self._counted + 1, self._later.popleft()
            return self._used


def stage_rounds(config: TrainConfig, islands: Sequence[Island]) -> tuple[int, ...]:
    """Return the number of rounds after which each stage but the first begins.

    The fleet has then made as many rounds as one island makes in the steps before the stage.

    - `islands`: the method of each stage

    Raises `UserError` if a stage has no round, or keeps the outer parameters in other shards.
    """
    schedule, found = islands[0].schedule, [0]
    shards = HostOuter(islands[0]).expected() if len(islands) > 1 else None
    for number, (stage, island) in enumerate(zip(config.each_stage[1:], islands[1:], strict=True)):
        rounds = schedule.rounds(stage.first)
        if not found[-1] < rounds < schedule.rounds(config.steps):
            raise UserError(
                f"stages.{number}.from is step {stage.first:,}, by which the fleet makes {rounds:,} rounds; the stage "
                f"before it begins after {found[-1]:,} of the {schedule.rounds(config.steps):,} rounds of the run. All "
                f"islands begin a stage after the same round, and sync.period {schedule.period} has "
                f"{schedule.fragments}. Give a stage at least one round."
            )
        if HostOuter(island).expected() != shards:
            raise UserError(
                f"stages.{number}.mesh: the outer parameters of an island stay in the shards of the first stage, and "
                "this mesh splits them in another way. Keep the axes that split parameters."
            )
        found.append(rounds)
    return tuple(found[1:])


def fleet_mixtures(config: TrainConfig, firsts: Sequence[int]) -> MixtureHistory:
    """Return the mixtures of a fleet's examples so far.

    - `firsts`: the first example of each stage that has begun after the first, of the fleet's ledger
    """
    found: MixtureHistory = ()
    for first, stage in zip([0, *firsts], config.each_stage, strict=False):
        found = with_mixture(found, first, *stage.config.mixture)
    return found
