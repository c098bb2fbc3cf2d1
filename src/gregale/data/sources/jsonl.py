"""JSON lines, plain or compressed."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from gregale.data.sources.base import (
    BYTE_ORDER_MARK,
    BadDocument,
    Document,
    FileSource,
    Part,
    SourceConfig,
    encodable,
    ranges,
    readable,
)
from gregale.errors import UserError

PART_BYTES = 8 << 20
READ_BYTES = 1 << 20
FIELDS_SHOWN = 20


@SourceConfig.register_subclass("jsonl")
@dataclass(frozen=True)
class JsonLinesSource(FileSource):
    """One JSON object a line (.jsonl, or compressed as .gz or .zst), its text in one field."""

    field: str = field(default="text", metadata={"help": "name of the field that holds a document's text"})

    def split(self, path: str) -> list[Part]:
        size = os.path.getsize(path)
        if is_compressed(path):
            return [Part(path, 0, size, size)]
        return [Part(path, start, stop, stop - start) for start, stop in ranges(size, PART_BYTES)]

    def scan(self, part: Part) -> Iterator[Document | BadDocument]:
        lines = compressed_lines(part.path) if is_compressed(part.path) else lines_of_part(part)
        for number, start, line in lines:
            content = line.removeprefix(BYTE_ORDER_MARK)
            if content.strip():
                try:
                    yield Document(self.text_of(content, f"{part.path}, line {number}"), part.path, start)
                except BadDocument as bad:
                    yield bad

    def text_of(self, line: bytes, place: str) -> str:
        """The text field of one line of JSON; raises `BadDocument` if it has none."""
        try:
            # Numbers are not used, and those of thousands of digits Python refuses to read.
            record = json.loads(line.decode("utf-8").rstrip(), parse_int=lambda digits: 0)
        except UnicodeDecodeError as error:
            raise BadDocument(
                f"{place}: byte {error.start} of the line, 0x{line[error.start]:02x}, is not UTF-8."
            ) from error
        except json.JSONDecodeError as error:
            raise BadDocument(f"{place}: not JSON ({error.msg} at column {error.colno}).") from error
        except RecursionError as error:
            raise BadDocument(f"{place}: the JSON is nested too deeply.") from error
        if not isinstance(record, dict):
            raise BadDocument(
                f"{place}: found {type(record).__name__}, expected a JSON object with field `{self.field}`."
            )
        if self.field not in record:
            found = ", ".join(list(record)[:FIELDS_SHOWN]) or "none"
            raise BadDocument(f"{place}: no field `{self.field}`; the fields of this line are: {found}.")
        if not isinstance(record[self.field], str):
            kind = type(record[self.field]).__name__
            raise BadDocument(f"{place}: field `{self.field}` is {kind}, expected text.")
        return encodable(record[self.field], place)


def is_compressed(path: str) -> bool:
    return path.endswith((".gz", ".zst"))


def lines_of_part(part: Part) -> Iterator[tuple[int, int, bytes]]:
    """(line number, byte offset, line) of the lines that begin in a part of a plain file."""
    with readable(part.path), open(part.path, "rb") as file:
        newlines = count_newlines(file, part.start)
        start = part.start
        if start > 0:
            file.seek(start - 1)
            skipped = file.readline()  # the rest of a line that began earlier, or just its newline
            newlines += skipped[1:].count(b"\n")
            start += len(skipped) - 1
        while start < part.stop and (line := file.readline()):
            newlines += 1
            yield newlines, start, line
            start += len(line)


def count_newlines(file: BinaryIO, stop: int) -> int:
    """Newlines in the first `stop` bytes, so that messages can give the number of a line in the whole file."""
    count = 0
    while (left := stop - file.tell()) > 0:
        count += file.read(min(left, READ_BYTES)).count(b"\n")
    return count


def compressed_lines(path: str) -> Iterator[tuple[int, int, bytes]]:
    """(line number, byte offset in the unpacked text, line) of a compressed file."""
    number, start, rest = 0, 0, b""
    for block in gzip_blocks(path) if path.endswith(".gz") else zstd_blocks(path):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            number += 1
            yield number, start, line
            start += len(line) + 1
    if rest:
        yield number + 1, start, rest


def gzip_blocks(path: str) -> Iterator[bytes]:
    try:
        with readable(path), gzip.open(path, "rb") as file:
            while block := file.read(READ_BYTES):
                yield block
    except (EOFError, zlib.error, OSError) as error:
        raise BadDocument(f"{path}: a damaged or truncated gzip file ({error}).") from error


def zstd_blocks(path: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path}: .zst files need the extra `formats`: pip install 'gregale[formats]'.") from error
    try:
        with readable(path), open(path, "rb") as file:
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
