"""Text and source files."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gregale.data.sources.base import Document, FileSource, Part, SourceConfig, read_bytes
from gregale.errors import UserError


@SourceConfig.register_subclass("text")
@dataclass(frozen=True)
class TextSource(FileSource):
    """UTF-8 text or source files: a document per file, or several where a separator is given."""

    separator: str = field(
        default="", metadata={"help": "text between two documents of one file; empty: a document per file"}
    )

    def read(self, part: Part) -> Iterator[Document]:
        data = read_bytes(part.path)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{part.path}, byte {error.start}: 0x{data[error.start]:02x} is not UTF-8 text. "
                "Convert the file, or leave it out with `exclude`."
            ) from error
        if not self.separator:
            yield Document(text, part.path, 0)
            return
        start = 0
        for piece in text.split(self.separator):
            yield Document(piece, part.path, start)
            start += len(piece.encode()) + len(self.separator.encode())
