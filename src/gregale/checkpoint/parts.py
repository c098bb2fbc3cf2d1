"""Byte streams in parts: files of 48 MiB on a disk, or objects of a store, each written by one request."""

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from gregale.checkpoint.manifest import FileRecords
from gregale.storage import ObjectPath, StoragePath, read_range

PART_BYTES = 48 << 20  # a part is one request, which is repeated whole after a failure
THREADS = 8  # number of parts in memory at once


def write_parts(folder: StoragePath, prefix: str, contents: Iterable[np.ndarray], part_bytes: int) -> FileRecords:
    """Write arrays of bytes in sequence to `prefix-00000`, `prefix-00001`, ...; return the parts' checksums.

    The iterator advances only as far as the parts in flight need. All writes have ended when this returns or raises.
    """
    records: FileRecords = {}
    with ThreadPoolExecutor(THREADS) as pool:
        in_flight: deque[tuple[str, Future[dict]]] = deque()
        for number, views in enumerate(cut(contents, part_bytes)):
            if len(in_flight) == THREADS:
                name, future = in_flight.popleft()
                records[name] = future.result()
            name = _part_name(prefix, number)
            in_flight.append((name, pool.submit(write_part, folder / name, views)))
        return records | {name: future.result() for name, future in in_flight}


def write_part(path: StoragePath, views: list[memoryview]) -> dict:
    """Write an object, or a file and flush it to the disk; return size and checksum for a manifest."""
    if isinstance(path, ObjectPath):
        path.write_bytes(b"".join(views))
    else:
        with path.open("wb") as file:
            file.writelines(views)
            file.flush()
            os.fsync(file.fileno())
    digest = hashlib.blake2b(digest_size=16)
    for view in views:
        digest.update(view)
    return {"bytes": sum(map(len, views)), "blake2b": digest.hexdigest()}


def read_parts(buffer: np.ndarray, folder: StoragePath, prefix: str, part_bytes: int, start: int) -> None:
    """Fill an array of bytes from position `start` of the stream; raise ValueError if a part is too short."""
    done = 0
    while done < len(buffer):
        number, offset = divmod(start + done, part_bytes)
        size = min(part_bytes - offset, len(buffer) - done)
        found = read_range(folder / _part_name(prefix, number), offset, offset + size)
        if len(found) < size:
            raise ValueError(f"{_part_name(prefix, number)} is shorter than what was written")
        buffer[done : done + size] = np.frombuffer(found, np.uint8)
        done += size


def cut(contents: Iterable[np.ndarray], part_bytes: int) -> Iterator[list[memoryview]]:
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
