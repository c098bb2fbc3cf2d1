"""Text and source files."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gregale.data.sources.base import (
    BYTE_ORDER_MARK,
    BadDocument,
    Document,
    FileSource,
    Part,
    SourceConfig,
    read_bytes,
)


@SourceConfig.register_subclass("text")
@dataclass(frozen=True)
class TextSource(FileSource):
    """UTF-8 text or source files: a document per file, or several where a separator is given."""

    separator: str = field(
        default="", metadata={"help": "text between two documents of one file; empty: a document per file"}
    )

    def scan(self, part: Part) -> Iterator[Document | BadDocument]:
        data = read_bytes(part.path)
        start = len(BYTE_ORDER_MARK) if data.startswith(BYTE_ORDER_MARK) else 0
        separator = self.separator.encode()
        for piece in data[start:].split(separator) if separator else [data[start:]]:
            yield decoded(piece, part.path, start)
            start += len(piece) + len(separator)


def decoded(piece: bytes, path: str, start: int) -> Document | BadDocument:
    """A piece of a file, found at the byte `start`, as a document."""
    try:
        return Document(piece.decode("utf-8"), path, start)
    except UnicodeDecodeError as error:
        return BadDocument(
            f"{path}, byte {start + error.start}: 0x{piece[error.start]:02x} is not UTF-8 text. "
            "Convert the file, or leave it out with `exclude`."
        )
