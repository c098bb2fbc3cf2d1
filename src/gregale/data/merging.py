"""The parts of a store on a disk become one file of tokens, without the room for a second copy.

They are written into `whole/tokens.bin` and `lengths.bin` in their order, some at a time. When these are on the disk,
`merged.json` notes it, and the files of those parts go. So whoever is killed leaves what the next one goes on from. Two
that are at it at once, after a pause that looked like death, write the same bytes to the same places.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from gregale.data.parts import Damaged, Seal, discard, part_name, read_part
from gregale.data.progress import Report
from gregale.data.store import READ_BYTES, TOKENS_NAME, json_sha256
from gregale.files import flush, write_bytes

WHOLE_NAME, MERGED_NAME, LENGTHS_NAME = "whole", "merged.json", "lengths.bin"
AT_ONCE_BYTES = 64 << 20  # of parts, which are there twice for a moment


class Growing:
    """A file that is written from a place on, and the SHA-256 of all that is before."""

    def __init__(self, file: BinaryIO, size: int):
        self._file, self.size = file, size
        self._digest = hashlib.sha256()
        file.seek(0)
        left = size
        while left and (block := file.read(min(left, READ_BYTES))):
            self._digest.update(block)
            left -= len(block)
        file.seek(size)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def add(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self.size += len(content)

    def flush(self) -> None:
        """Waits until it is on the disk, and ends there."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def end(self) -> None:
        self._file.truncate(self.size)


@dataclass(frozen=True)
class Merged:
    """How far it has come.

    Attributes:
        parts: how many are merged, the first ones.
        tokens: bytes of them in `tokens.bin`, and their SHA-256.
        lengths: bytes of them in `lengths.bin`, and their SHA-256.
    """

    parts: int
    tokens: tuple[int, str]
    lengths: tuple[int, str]

    @staticmethod
    def read(parts: Path) -> "Merged | None":
        """What is noted; None if nothing is, or the note is damaged."""
        try:
            found = json.loads((parts / MERGED_NAME).read_bytes())
            if found.pop("check") != json_sha256(found):
                return None
            return Merged(found["parts"], tuple(found["tokens"]), tuple(found["lengths"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, parts: Path) -> None:
        content = json.loads(json.dumps(asdict(self)))
        write_bytes(parts / MERGED_NAME, json.dumps(content | {"check": json_sha256(content)}).encode())
        flush(parts / MERGED_NAME)


def merge(parts: Path, seals: Sequence[Seal], removes: bool, report: Report) -> dict:
    """Makes `whole/tokens.bin` and `lengths.bin` of the parts, going on where a killed process stopped.

    Args:
        parts: where they lie.
        seals: of all of them.
        removes: each part goes when it is merged; else somebody still reads them.
        report: told the bytes of the parts that are merged, as `putting together`.

    Returns:
        What the manifest says of `tokens.bin`.

    Raises:
        Damaged: a part is not what was sealed.
    """
    while True:
        try:
            return _merge(parts, seals, removes, report)
        except Damaged as damaged:
            note = Merged.read(parts)
            if note is None or note.parts <= damaged.number:
                raise  # else another process has merged it meanwhile


def _merge(parts: Path, seals: Sequence[Seal], removes: bool, report: Report) -> dict:
    note = Merged.read(parts) or Merged(0, (0, ""), (0, ""))
    (parts / WHOLE_NAME).mkdir(exist_ok=True)
    with (
        _opened(parts / WHOLE_NAME / TOKENS_NAME, note.tokens[0]) as tokens,
        _opened(parts / LENGTHS_NAME, note.lengths[0]) as lengths,
    ):
        if note.parts and (tokens.sha256, lengths.sha256) != (note.tokens[1], note.lengths[1]):
            _forget(parts, note.parts)
        done, total = sum(seal.size_bytes for seal in seals[: note.parts]), sum(seal.size_bytes for seal in seals)
        for group in _groups(seals, note.parts):
            for number in group:
                split(parts, number, seals[number], tokens.add, lengths.add)
                done += seals[number].size_bytes
                if len(seals) > 1:  # one takes no time
                    report("putting together", done, total)
            tokens.flush()
            lengths.flush()
            at = (tokens.size, tokens.sha256), (lengths.size, lengths.sha256)
            Merged(group[-1] + 1, *at).write(parts)
            for number in group if removes else ():
                (parts / part_name(number)).unlink(missing_ok=True)
        tokens.end()
        lengths.end()
        return {"bytes": tokens.size, "sha256": tokens.sha256}


def split(parts, number: int, seal: Seal, tokens, lengths) -> None:
    """Reads and checks a part, and hands its tokens and its documents' lengths over, both as bytes in their order."""
    left = seal.tokens * seal.itemsize
    for block in read_part(parts, number, seal):
        tokens(block[:left])
        lengths(block[left:])
        left = max(left - len(block), 0)


def _groups(seals: Sequence[Seal], first: int) -> Iterator[list[int]]:
    """The numbers of the parts from one on, in groups of about `AT_ONCE_BYTES`."""
    group, size = [], 0
    for number in range(first, len(seals)):
        group.append(number)
        size += seals[number].size_bytes
        if size >= AT_ONCE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _forget(parts: Path, count: int) -> None:
    """What was merged is damaged: these parts have to be encoded again."""
    (parts / MERGED_NAME).unlink(missing_ok=True)
    for number in range(count):
        discard(parts, number)
    raise Damaged(0)


@contextmanager
def _opened(path: Path, size: int) -> Iterator[Growing]:
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        yield Growing(file, size)
