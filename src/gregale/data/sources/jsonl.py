"""JSON lines, plain or compressed."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gregale.data.sources.base import (
    BYTE_ORDER_MARK,
    BadDocument,
    Document,
    FileSource,
    SourceConfig,
    SourceRange,
    encodable,
    ranges,
)
from gregale.data.sources.files import opened, readable
from gregale.errors import UserError, install_hint
from gregale.settings import setting

PART_BYTES = 8 << 20
READ_BYTES = 1 << 20
FIELDS_SHOWN = 20


@SourceConfig.register_subclass("jsonl")
@dataclass(frozen=True)
class JsonLinesSource(FileSource):
    """One JSON object a line (.jsonl, or compressed as .gz or .zst), its text in one field."""

    field: str = setting("text", "name of the field that holds a document's text")

    def split(self, path: str, size: int) -> list[SourceRange]:
        if is_compressed(path):
            return [SourceRange(path, 0, size, size)]
        return [SourceRange(path, start, stop, stop - start) for start, stop in ranges(size, PART_BYTES)]

    def scan(self, part: SourceRange) -> Iterator[Document | BadDocument]:
        first = None  # the offset of the first of these lines
        lines = compressed_lines(part.path) if is_compressed(part.path) else lines_of_part(part)
        for number, (start, line) in enumerate(lines, 1):
            first = (0 if is_compressed(part.path) else start) if first is None else first
            content = line.removeprefix(BYTE_ORDER_MARK)
            if content.strip():
                try:
                    yield Document(self.text_of(content, Line(part.path, first, number)), part.path, start)
                except BadDocument as bad:
                    yield bad

    def text_of(self, line: bytes, location: object) -> str:
        """Return the text field of one line of JSON; raise `BadDocument` if it has none."""
        record = parsed(line, location)
        if not isinstance(record, dict):
            raise BadDocument(
                f"{location}: found {type(record).__name__}, expected a JSON object with field `{self.field}`."
            )
        if self.field not in record:
            found = ", ".join(list(record)[:FIELDS_SHOWN]) or "none"
            raise BadDocument(f"{location}: no field `{self.field}`; the fields of this line are: {found}.")
        if not isinstance(record[self.field], str):
            kind = type(record[self.field]).__name__
            raise BadDocument(f"{location}: field `{self.field}` is {kind}, expected text.")
        return encodable(record[self.field], location)


def parsed(line: bytes, location: object) -> Any:
    """Return the value of a line of JSON; raise `BadDocument` if it is invalid."""
    try:
        # Python refuses whole numbers of thousands of digits.
        return json.loads(line.decode("utf-8").rstrip(), parse_int=lambda digits: int(digits[:20]))
    except UnicodeDecodeError as error:
        raise BadDocument(
            f"{location}: byte {error.start} of the line, 0x{line[error.start]:02x}, is not UTF-8."
        ) from error
    except json.JSONDecodeError as error:
        raise BadDocument(f"{location}: not JSON ({error.msg} at column {error.colno}).") from error
    except RecursionError as error:
        raise BadDocument(f"{location}: the JSON is nested too deeply.") from error


def is_compressed(path: str) -> bool:
    return path.endswith((".gz", ".zst"))


@dataclass(frozen=True)
class Line:
    """The location of a line: the `number`-th from byte `first` on. The line number is counted when it is printed."""

    path: str
    first: int
    number: int

    def __str__(self) -> str:
        return f"{self.path}, line {newlines_before(self.path, self.first) + self.number}"


def lines_of_part(part: SourceRange) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, line) of the lines that begin in a range of a plain file."""
    with readable(part.path), opened(part.path) as file:
        start = part.start
        if start > 0:
            file.seek(start - 1)
            start += len(file.readline()) - 1  # skip the rest of a line that began earlier, or its newline
        while start < part.stop and (line := file.readline()):
            yield start, line
            start += len(line)


@lru_cache(maxsize=8)  # the lines of one range are counted from the same offset
def newlines_before(path: str, stop: int) -> int:
    """Return the number of newlines in the first `stop` bytes of a file."""
    count = 0
    with readable(path), opened(path) as file:
        while (left := stop - file.tell()) > 0 and (block := file.read(min(left, READ_BYTES))):
            count += block.count(b"\n")
    return count


def compressed_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset in the unpacked text, line) of a compressed file."""
    start, rest = 0, b""
    for block in gzip_blocks(path) if path.endswith(".gz") else zstd_blocks(path):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield start, line
            start += len(line) + 1
    if rest:
        yield start, rest


def gzip_blocks(path: str) -> Iterator[bytes]:
    try:
        with readable(path), opened(path) as packed, gzip.open(packed, "rb") as file:
            while block := file.read(READ_BYTES):
                yield block
    except (EOFError, zlib.error, OSError) as error:
        raise BadDocument(f"{path}: a damaged or truncated gzip file ({error}).") from error


def zstd_blocks(path: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path}: .zst files need the extra `formats`. {install_hint('formats')}") from error
    try:
        with readable(path), opened(path) as file:
            frame = zstandard.ZstdDecompressor().decompressobj()
            waiting = b""
            while data := waiting or file.read(READ_BYTES):
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(data)
                waiting = frame.unused_data if frame.eof else b""
            if not frame.eof:
                raise BadDocument(f"{path}: a truncated zstd file (it ends inside a frame).")
    except zstandard.ZstdError as error:
        raise BadDocument(f"{path}: a damaged zstd file ({error}).") from error
