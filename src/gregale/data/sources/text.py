"""Text and source files."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from gregale.data.sources.base import (
    BYTE_ORDER_MARK,
    BadDocument,
    Document,
    FileSource,
    SourceConfig,
    SourceRange,
    ranges,
)
from gregale.data.sources.compression import compression_of, is_compressed, pieces, unpacked
from gregale.data.sources.files import opened, readable
from gregale.settings import setting

PART_BYTES = 8 << 20
SEARCH_BYTES = 64 << 10


@SourceConfig.register_subclass("text")
@dataclass(frozen=True)
class TextSource(FileSource):
    """UTF-8 text or source files, plain or compressed: a document per file, or several if a separator is given."""

    separator: str = setting("", "text between two documents of one file; empty: a document per file")

    def split(self, path: str, size: int) -> list[SourceRange]:
        if not can_be_cut_at(self.separator.encode()) or (size > PART_BYTES and is_compressed(path)):
            return super().split(path, size)
        return [SourceRange(path, start, stop, stop - start) for start, stop in ranges(size, PART_BYTES)]

    def scan(self, part: SourceRange) -> Iterator[Document | BadDocument]:
        for start, content in contents(part, self.separator.encode()):
            mark = len(BYTE_ORDER_MARK) if start == 0 and content.startswith(BYTE_ORDER_MARK) else 0
            yield decoded(content[mark:], part.path, start + mark)


def contents(part: SourceRange, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset in the unpacked text, bytes) of the documents that begin in a range."""
    with readable(part.path), opened(part.path) as file:
        if part.start == 0 and (kind := compression_of(part.path, file)):
            blocks = unpacked(part.path, kind)
            yield from pieces(blocks, separator) if separator else [(0, b"".join(blocks))]
            return
        data, start = of_part(file, part, separator) if can_be_cut_at(separator) else (file.read(), 0)
    for content in data.split(separator) if separator else [data]:
        yield start, content
        start += len(content) + len(separator)


def can_be_cut_at(separator: bytes) -> bool:
    """Return whether a separator can be found from the middle of a file: no two of them can overlap."""
    return bool(separator) and not any(separator.startswith(separator[at:]) for at in range(1, len(separator)))


def of_part(file: BinaryIO, part: SourceRange, separator: bytes) -> tuple[bytes, int]:
    """Return the bytes of the documents that begin in a range, up to the last separator, and their offset."""
    start = 0
    if part.start > 0:  # the separator before the first document here may begin earlier
        start = find(file, separator, part.start - len(separator)) + len(separator)
    if start >= part.stop:
        return b"", part.stop
    stop = find(file, separator, max(part.stop - len(separator), start))
    file.seek(start)
    return file.read(stop - start), start


def find(file: BinaryIO, separator: bytes, start: int) -> int:
    """Return the offset of the first separator at or after `start`; the end of the file if there is none."""
    at = file.seek(max(start, 0))
    rest = b""
    while block := file.read(SEARCH_BYTES):
        data = rest + block
        if (found := data.find(separator)) >= 0:
            return at + found
        rest = data[len(data) - len(separator) + 1 :]
        at += len(data) - len(rest)
    return at + len(rest)


def decoded(content: bytes, path: str, start: int) -> Document | BadDocument:
    """Return bytes of a file, from the offset `start`, as a document."""
    try:
        return Document(content.decode("utf-8"), path, start)
    except UnicodeDecodeError as error:
        return BadDocument(
            f"{path}, byte {start + error.start}: 0x{content[error.start]:02x} is not UTF-8 text. "
            "Convert the file, or leave it out with `exclude`."
        )
