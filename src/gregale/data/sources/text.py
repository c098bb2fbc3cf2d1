"""Text and source files."""

from collections.abc import Iterator
from dataclasses import dataclass

from gregale.data.sources.base import BYTE_ORDER_MARK, BadDocument, Document, FileSource, SourceConfig, SourceRange
from gregale.data.sources.compression import compression_of, pieces_of_part, text_ranges, unpacked
from gregale.data.sources.files import opened, readable
from gregale.settings import setting

PART_BYTES = 8 << 20


@SourceConfig.register_subclass("text")
@dataclass(frozen=True)
class TextSource(FileSource):
    """UTF-8 text or source files, plain or compressed: a document per file, or several if a separator is given."""

    separator: str = setting("", "text between two documents of one file; empty: a document per file")

    def split(self, path: str, size: int) -> list[SourceRange]:
        if can_be_cut_at(self.separator.encode()):
            return text_ranges(path, size, PART_BYTES)
        return super().split(path, size)

    def scan(self, part: SourceRange) -> Iterator[Document | BadDocument]:
        for start, content in self.contents(part):
            mark = len(BYTE_ORDER_MARK) if start == 0 and content.startswith(BYTE_ORDER_MARK) else 0
            yield decoded(content[mark:], part.path, start + mark)

    def contents(self, part: SourceRange) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes of the documents that begin in a range."""
        if self.separator:
            yield from pieces_of_part(part, self.separator.encode())
        else:
            with readable(part.path), opened(part.path) as file:
                kind = compression_of(part.path, file)
                yield 0, b"".join(unpacked(part.path, kind)) if kind else file.read()


def can_be_cut_at(separator: bytes) -> bool:
    """Return whether a separator can be found from the middle of a file: no two of them can overlap."""
    return bool(separator) and not any(separator.startswith(separator[at:]) for at in range(1, len(separator)))


def decoded(content: bytes, path: str, start: int) -> Document | BadDocument:
    """Return bytes of a file, from the offset `start`, as a document."""
    try:
        return Document(content.decode("utf-8"), path, start)
    except UnicodeDecodeError as error:
        return BadDocument(
            f"{path}, byte {start + error.start}: 0x{content[error.start]:02x} is not UTF-8 text. "
            "Convert the file, or leave it out with `exclude`."
        )
