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
from gregale.data.sources.files import opened, read_bytes, readable
from gregale.settings import setting

PART_BYTES = 8 << 20
SEARCH_BYTES = 64 << 10


@SourceConfig.register_subclass("text")
@dataclass(frozen=True)
class TextSource(FileSource):
    """UTF-8 text or source files: a document per file, or several if a separator is given."""

    separator: str = setting("", "text between two documents of one file; empty: a document per file")

    def split(self, path: str, size: int) -> list[SourceRange]:
        if not can_be_cut_at(self.separator.encode()):
            return super().split(path, size)
        return [SourceRange(path, start, stop, stop - start) for start, stop in ranges(size, PART_BYTES)]

    def scan(self, part: SourceRange) -> Iterator[Document | BadDocument]:
        separator = self.separator.encode()
        with readable(part.path):
            data, start = of_part(part, separator) if can_be_cut_at(separator) else (read_bytes(part.path), 0)
        if start == 0 and data.startswith(BYTE_ORDER_MARK):
            start, data = len(BYTE_ORDER_MARK), data[len(BYTE_ORDER_MARK) :]
        for content in data.split(separator) if separator else [data]:
            yield decoded(content, part.path, start)
            start += len(content) + len(separator)


def can_be_cut_at(separator: bytes) -> bool:
    """Return whether a separator can be found from the middle of a file: no two of them can overlap."""
    return bool(separator) and not any(separator.startswith(separator[at:]) for at in range(1, len(separator)))


def of_part(part: SourceRange, separator: bytes) -> tuple[bytes, int]:
    """Return the bytes of the documents that begin in a range, up to the last separator, and their offset."""
    with opened(part.path) as file:
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
