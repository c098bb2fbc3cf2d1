"""Bytes cut into parts: files of 48 MiB on a disk, or objects of a store, each written by one request."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from gregale.checkpoint.manifest import FileRecords
from gregale.storage import ObjectPath, StoragePath, read_range

PART_BYTES = 48 << 20  # s3fs and gcsfs write so much in one request
THREADS = 8  # parts at once, which are in memory meanwhile


def write_parts(folder: StoragePath, prefix: str, contents: Iterable[np.ndarray], part_bytes: int) -> FileRecords:
    """Writes arrays of bytes one after the other into `prefix-00000`, `prefix-00001`, ...; returns their checksums.

    No more of the arrays are asked for than a few parts need. Nothing is written any more when it returns or raises.
    """
    records: FileRecords = {}
    with ThreadPoolExecutor(THREADS) as pool:
        under_way: deque[tuple[str, Future[dict]]] = deque()
        for number, views in enumerate(cut(contents, part_bytes)):
            if len(under_way) == THREADS:
                name, future = under_way.popleft()
                records[name] = future.result()
            name = _part_name(prefix, number)
            under_way.append((name, pool.submit(write_part, folder / name, views)))
        return records | {name: future.result() for name, future in under_way}


def write_part(place: StoragePath, views: list[memoryview]) -> dict:
    """Writes a file, which is on the disk then, or an object; returns its size and checksum for a manifest."""
    if isinstance(place, ObjectPath):
        place.write_bytes(b"".join(views))
    else:
        with place.open("wb") as file:
            file.writelines(views)
            file.flush()
            os.fsync(file.fileno())
    digest = hashlib.blake2b(digest_size=16)
    for view in views:
        digest.update(view)
    return {"bytes": sum(map(len, views)), "blake2b": digest.hexdigest()}


def read_parts(buffer: np.ndarray, folder: StoragePath, prefix: str, part_bytes: int, start: int) -> None:
    """Fills an array of bytes with those that begin at `start`; raises ValueError if a part is too short."""
    at = 0
    while at < len(buffer):
        number, offset = divmod(start + at, part_bytes)
        size = min(part_bytes - offset, len(buffer) - at)
        found = read_range(folder / _part_name(prefix, number), offset, offset + size)
        if len(found) < size:
            raise ValueError(f"{_part_name(prefix, number)} is shorter than what was written")
        buffer[at : at + size] = np.frombuffer(found, np.uint8)
        at += size


def cut(contents: Iterable[np.ndarray], part_bytes: int) -> Iterator[list[memoryview]]:
    """The parts in their order, each as the views that make it up."""
    part: list[memoryview] = []
    room = part_bytes
    for content in contents:
        view = content.data
        while len(view):
            part.append(view[:room])
            view, room = view[len(part[-1]) :], room - len(part[-1])
            if not room:
                yield part
                part, room = [], part_bytes
    if part:
        yield part


def _part_name(prefix: str, number: int) -> str:
    return f"{prefix}-{number:05d}"
