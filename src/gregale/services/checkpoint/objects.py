"""Checkpoints in an object store, where no process sees another's disk.

A checkpoint is `step-00000100/manifest.json`, written last, and below `step-00000100/1f2e3d4c/`, named by chance for
each run of the program, `leaves.json`, `metadata.json`, `pieces.json` and the streams of all processes (see `pieces`),
cut into objects of 48 MiB: `00003-00000` is the first of process 3. Nothing is renamed: without its manifest none of it
counts. What a lost process of an earlier start still writes falls into another folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from uuid import uuid4

import jax
import numpy as np

from gregale.services.checkpoint.leaves import sharding_of
from gregale.services.checkpoint.manifest import (
    MANIFEST,
    FileRecords,
    digest_of,
    find_damage,
    read_records,
    write_manifest,
)
from gregale.services.checkpoint.pieces import (
    Block,
    Piece,
    Plan,
    Rows,
    block_of,
    parts,
    planned,
    rows_for,
    stream,
    wanted,
)
from gregale.services.checkpoint.processes import collect, hand_over, messages_of_all
from gregale.services.checkpoint.retention import committed_steps, folder_name, step_of
from gregale.services.checkpoint.shelf import Structs
from gregale.storage import Remote, StoreError

PIECES = "pieces.json"
PART_BYTES = 48 << 20  # s3fs and gcsfs write so much in one request
_THREADS = 8  # requests at once


class ObjectShelf:
    """See `Shelf`."""

    def __init__(self, directory: Remote, part_bytes: int = PART_BYTES):
        self._directory, self._part_bytes = directory, part_bytes
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint objects")
        self._texts: dict[str, str] = {}
        self._own = ""  # the name, the same in every process, of the folder in which the save under way writes
        self._writing: list[Future[tuple[str, dict]]] = []

    def steps(self) -> list[int]:
        return committed_steps(self._directory)

    def without_manifest(self) -> list[int]:
        there = {step for name in self._directory.names() if (step := step_of(name)) is not None}
        return sorted(there.difference(self.steps()))

    def begin(self, step: int, texts: dict[str, str], size: int) -> None:
        self._texts = texts
        self._own = messages_of_all(uuid4().hex[:8])[0]  # before anything can fail in one process
        if jax.process_index() == 0:
            self._remove(self._directory, self._leftovers())

    def take(self, step: int, arrays: dict[str, jax.Array]) -> None:
        plan, process = planned(arrays), jax.process_index()
        pieces = stream(arrays, plan, process)
        texts = self._texts | {PIECES: _to_json(plan, self._part_bytes)} if process == 0 else {}
        contents = [(name, [memoryview(text.encode())]) for name, text in texts.items()]
        contents += [(_part_name(process, n), part) for n, part in enumerate(parts(pieces, self._part_bytes))]
        write = partial(_write, self._directory / folder_name(step), self._own)
        self._writing = [self._threads.submit(write, name, views) for name, views in contents]

    def finish(self) -> None:
        """All requests are over when it returns or raises, and nothing is written any more."""
        try:
            for future in self._writing:
                future.result()
        except BaseException:
            for future in self._writing:
                future.cancel()
            wait(self._writing)
            self._writing = []
            raise

    def record(self, step: int) -> FileRecords:
        records = dict(future.result() for future in self._writing)
        self._writing = []  # with them go the copies of the arrays
        if jax.process_index() > 0:
            hand_over(self._directory / folder_name(step) / self._own, jax.process_index(), records)
        return records

    def publish(self, step: int, records: FileRecords) -> None:
        folder = self._directory / folder_name(step)
        write_manifest(folder, records | collect(folder / self._own, jax.process_count()))
        with suppress(StoreError):  # of a damaged one, say, in whose place this one is; it goes with this one at last
            others = (name for name in folder.files_below() if name != MANIFEST)
            self._remove(folder, [name for name in others if not name.startswith(f"{self._own}/")])

    def clear(self, step: int) -> None:
        """Nothing: the store may be what failed, and the next `begin` does it."""
        self._writing = []

    def delete(self, step: int) -> None:
        """Takes the manifest away first."""
        folder = self._directory / folder_name(step)
        (folder / MANIFEST).unlink(missing_ok=True)
        self._remove(folder, folder.files_below())

    def read(self, step: int, name: str) -> bytes:
        return (self._root(step) / name).read_bytes()

    def arrays(self, step: int, structs: Structs) -> dict[str, jax.Array]:
        plan, part_bytes = _from_json(self.read(step, PIECES))
        root = self._root(step)
        buffers: dict[str, dict[Block, np.ndarray]] = {}
        jobs = []
        for name, struct in structs.items():
            blocks = wanted(sharding_of(struct), struct.shape)
            buffers[name] = {block: np.empty(block.shape, struct.dtype) for block in blocks}
            found = (rows_for(piece, blocks, struct.dtype.itemsize) for piece in plan[name])
            jobs += [(rows, buffers[name]) for rows in found if rows]
        list(self._threads.map(lambda job: _fill(root, part_bytes, *job), jobs))
        jobs.clear()  # so that each buffer goes as soon as its array is made

        def made(name: str, struct: jax.ShapeDtypeStruct | jax.Array) -> jax.Array:
            of = buffers.pop(name)
            return jax.make_array_from_callback(
                struct.shape, sharding_of(struct), lambda index: of[block_of(index or (), struct.shape)]
            )

        return {name: made(name, struct) for name, struct in structs.items()}

    def damage(self, step: int, part: int, parts: int) -> str | None:
        return find_damage(self._directory / folder_name(step), part, parts)

    def close(self, has_failed: bool) -> None:
        self._threads.shutdown()

    def _root(self, step: int) -> Remote:
        """Where the objects are that a checkpoint's manifest names."""
        folder = self._directory / folder_name(step)
        return folder / next(iter(read_records(folder))).partition("/")[0]

    def _leftovers(self) -> list[str]:
        """What belongs to checkpoints without a manifest."""
        found = self._directory.files_below()
        committed = set(self.steps())
        return [name for name in found if (step := step_of(name)) is not None and step not in committed]

    def _remove(self, folder: Remote, names: Iterable[str]) -> None:
        list(self._threads.map(lambda name: (folder / name).unlink(missing_ok=True), names))


def _write(folder: Remote, own: str, name: str, views: list[memoryview]) -> tuple[str, dict]:
    """Writes an object; returns its name and record for the manifest."""
    content = b"".join(views)
    (folder / own / name).write_bytes(content)
    return f"{own}/{name}", {"bytes": len(content), "blake2b": digest_of(content)}


def _fill(root: Remote, part_bytes: int, rows: Rows, buffers: dict[Block, np.ndarray]) -> None:
    """Reads some rows of a piece and puts what blocks have of them into their buffers."""
    content = b"".join(_read(root, part_bytes, rows))
    dtype = next(iter(buffers.values())).dtype
    values = np.frombuffer(content, dtype).reshape(rows.block.shape)
    for block, buffer in buffers.items():
        if overlap := rows.block.overlap(block):
            buffer[overlap.within(block)] = values[overlap.within(rows.block)]


def _read(root: Remote, part_bytes: int, rows: Rows) -> Iterable[bytes]:
    at = rows.start
    while at < rows.stop:
        number, offset = divmod(at, part_bytes)
        stop = min(offset + rows.stop - at, part_bytes)
        yield (root / _part_name(rows.process, number)).read_range(offset, stop)
        at += stop - offset


def _part_name(process: int, number: int) -> str:
    return f"{process:05d}-{number:05d}"


def _to_json(plan: Plan, part_bytes: int) -> str:
    arrays = {name: [[*piece.block, piece.process, piece.offset] for piece in pieces] for name, pieces in plan.items()}
    return json.dumps({"part_bytes": part_bytes, "arrays": arrays})


def _from_json(content: bytes) -> tuple[Plan, int]:
    found = json.loads(content)
    plan = {
        name: [Piece(Block(tuple(start), tuple(shape)), *rest) for start, shape, *rest in pieces]
        for name, pieces in found["arrays"].items()
    }
    return plan, found["part_bytes"]
