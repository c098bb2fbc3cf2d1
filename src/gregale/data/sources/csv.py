"""CSV and TSV files, plain or compressed."""

import csv
import re
import sys
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from gregale.data.sources.base import (
    BYTE_ORDER_MARK,
    BadDocument,
    Document,
    FileSource,
    SourceConfig,
    SourceRange,
    encodable,
)
from gregale.data.sources.compression import pieces_of_part
from gregale.errors import KeyedError, UserError
from gregale.settings import restated, setting


@dataclass(frozen=True)
class CsvRecords(FileSource):
    """Values separated by commas, plain or compressed, a document per record.

    One process reads a file, because only its beginning tells which line breaks lie inside quotes.
    """

    delimiter: ClassVar[str] = ","

    quotes: bool = setting(True, 'whether "..." may hold delimiters and line breaks, and "" is a quote')

    def scan(self, part: SourceRange) -> Iterator[Document | BadDocument]:
        csv.field_size_limit(sys.maxsize)  # of this process; 131,072 characters by default
        quoting = csv.QUOTE_MINIMAL if self.quotes else csv.QUOTE_NONE
        found = self.records(csv.reader(lines_of(part), delimiter=self.delimiter, quoting=quoting, strict=True))
        names, needed = self.names_in(found, part.path)
        for line, record in found:
            if isinstance(record, str):
                yield BadDocument(f"{part.path}, line {line}: {record}")
            elif len(record) < needed or (names and len(record) != needed):
                expected = f"expected {needed}, as the header" if names else f"expected column {needed}"
                yield BadDocument(f"{part.path}, line {line}: {len(record)} values, {expected}.")
            else:
                yield self.document(record, names, part.path, line)

    def records(self, reader: Any) -> Iterator[tuple[int, list[str] | str]]:
        """Yield first line and values of each record that is not an empty line, or the error of an invalid one."""
        while True:
            line = reader.line_num + 1
            try:
                record: list[str] | str = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                record = f"not {self.get_choice_name(type(self)).upper()} ({error})."
            if record:
                yield line, record

    def names_in(self, found: Iterator[tuple[int, list[str] | str]], path: str) -> tuple[list[str], int]:
        """Read the header; return the names of the columns, and the number of values that a record needs."""
        header = next(found, None)
        if header is None:
            raise BadDocument(f"{path}: empty, expected a header with the columns' names.")
        if isinstance(names := header[1], str):
            raise BadDocument(f"{path}, line {header[0]}: {names}")
        return names, len(names)

    @abstractmethod
    def document(self, record: list[str], names: list[str], path: str, line: int) -> Document | BadDocument:
        """Return the document of a record; `names`: of the columns, or empty without a header."""


@SourceConfig.register_subclass("csv")
@dataclass(frozen=True)
class CsvSource(CsvRecords):
    """Values separated by commas, plain or compressed, a document per record, its text in one column.

    One process reads a file, because only its beginning tells which line breaks lie inside quotes.
    """

    column: str = setting("text", "name of the column with a document's text; without header its number, from 1")
    header: bool = setting(True, "whether the first record has the columns' names")

    def __post_init__(self):
        super().__post_init__()
        if not self.header and not re.fullmatch("0*[1-9][0-9]*", self.column):
            raise KeyedError("column", f"is {self.column!r}", ", but header is false: give its number, from 1.")

    def names_in(self, found: Iterator[tuple[int, list[str] | str]], path: str) -> tuple[list[str], int]:
        if not self.header:
            return [], int(self.column)
        names, count = super().names_in(found, path)
        if names.count(self.column) != 1:
            how = "several columns are" if self.column in names else "no column is"
            raise UserError(f"{path}: {how} named `{self.column}`; the columns are: {', '.join(names)}.")
        return names, count

    def document(self, record: list[str], names: list[str], path: str, line: int) -> Document | BadDocument:
        text = record[names.index(self.column) if names else int(self.column) - 1]
        location = f"{path}, line {line}"
        return invalid_byte(text, location) or Document(encodable(text, location), path, line)


@SourceConfig.register_subclass("tsv")
@dataclass(frozen=True)
class TsvSource(CsvSource):
    """Values separated by tabs, otherwise as `csv`."""

    delimiter: ClassVar[str] = "\t"

    quotes: bool = restated(CsvSource, "quotes", False)


def lines_of(part: SourceRange) -> Iterator[str]:
    """Yield the lines of a file as text; bytes that are not UTF-8 stay escaped."""
    for start, line in pieces_of_part(part, b"\n"):
        line = line.removeprefix(BYTE_ORDER_MARK) if start == 0 else line
        yield line.decode("utf-8", "surrogateescape") + "\n"


def invalid_byte(text: str, location: str) -> BadDocument | None:
    """Return the error of a value that is not UTF-8."""
    escaped = next((each for each in text if "\udc80" <= each <= "\udcff"), None)
    if escaped is None:
        return None
    return BadDocument(f"{location}: the byte 0x{ord(escaped) - 0xDC00:02x} of the text is not UTF-8.")
