"""CSV and TSV files, plain or compressed."""

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gregale.data.sources.base import (
    BYTE_ORDER_MARK,
    BadDocument,
    Document,
    FileSource,
    SourceConfig,
    SourceRange,
    encodable,
)
from gregale.data.sources.jsonl import lines_of_part
from gregale.errors import KeyedError, UserError
from gregale.settings import restated, setting


@SourceConfig.register_subclass("csv")
@dataclass(frozen=True)
class CsvSource(FileSource):
    """Values separated by commas, plain or compressed, a document per record, its text in one column.

    One process reads a file, because only its beginning tells which line breaks lie inside quotes.
    """

    delimiter: ClassVar[str] = ","

    column: str = setting("text", "name of the column with a document's text; without header its number, from 1")
    header: bool = setting(True, "whether the first record has the columns' names")
    quotes: bool = setting(True, 'whether "..." may hold delimiters and line breaks, and "" is a quote')

    def __post_init__(self):
        super().__post_init__()
        if not self.header and not (self.column.isdecimal() and int(self.column) > 0):
            raise KeyedError("column", f"is {self.column!r}", ", but header is false: give its number, from 1.")

    def scan(self, part: SourceRange) -> Iterator[Document | BadDocument]:
        csv.field_size_limit(sys.maxsize)  # of this process; 131,072 characters by default
        lines = Lines(part)
        quoting = csv.QUOTE_MINIMAL if self.quotes else csv.QUOTE_NONE
        records = csv.reader(lines, delimiter=self.delimiter, quoting=quoting, strict=True)
        found = self.records(records, lines)
        place, count = self.place_in(next(found, None), part.path) if self.header else (int(self.column) - 1, None)
        for location, start, record in found:
            if isinstance(record, BadDocument):
                yield record
            elif len(record) <= place or (count is not None and len(record) != count):
                expected = f"expected {count}, as the header" if count else f"expected column {self.column}"
                yield BadDocument(f"{location}: {len(record)} values, {expected}.")
            else:
                yield document(record[place], location, part.path, start)

    def records(
        self, reader: Iterator[list[str]], lines: "Lines"
    ) -> Iterator[tuple[str, int, list[str] | BadDocument]]:
        """Yield location, byte offset and values of each record that is not an empty line."""
        while True:
            lines.begin()
            try:
                record: list[str] | BadDocument = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                record = BadDocument(f"{lines.location}: not {self.get_choice_name(type(self)).upper()} ({error}).")
            if record:
                yield lines.location, lines.start, record

    def place_in(self, header: tuple[str, int, list[str] | BadDocument] | None, path: str) -> tuple[int, int]:
        """Return the index of the column, and the number of columns."""
        if header is None:
            raise BadDocument(f"{path}: empty, expected a header with the columns' names.")
        if isinstance(names := header[2], BadDocument):
            raise names
        if names.count(self.column) != 1:
            how = "several columns are" if self.column in names else "no column is"
            raise UserError(f"{path}: {how} named `{self.column}`; the columns are: {', '.join(names)}.")
        return names.index(self.column), len(names)


@SourceConfig.register_subclass("tsv")
@dataclass(frozen=True)
class TsvSource(CsvSource):
    """Values separated by tabs, otherwise as `csv`."""

    delimiter: ClassVar[str] = "\t"

    quotes: bool = restated(CsvSource, "quotes", False)


class Lines:
    """The lines of a file as text, with the place of the record that is read; bytes that are not UTF-8 stay escaped."""

    def __init__(self, part: SourceRange):
        self._path = part.path
        self._lines = lines_of_part(part)
        self._next, self._number, self._first = 0, 0, 1
        self.start = 0

    def begin(self) -> None:
        """Begin a record with the next line."""
        self.start, self._first = self._next, self._number + 1

    @property
    def location(self) -> str:
        """Return the file and the line where the record begins."""
        return f"{self._path}, line {self._first}"

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> str:
        start, line = next(self._lines)
        self._number += 1
        line = line if line.endswith(b"\n") else line + b"\n"
        self._next = start + len(line)
        return (line.removeprefix(BYTE_ORDER_MARK) if start == 0 else line).decode("utf-8", "surrogateescape")


def document(text: str, location: str, path: str, start: int) -> Document | BadDocument:
    """Return a value as a document if it is UTF-8."""
    escaped = next((each for each in text if "\udc80" <= each <= "\udcff"), None)
    if escaped is not None:
        return BadDocument(f"{location}: the byte 0x{ord(escaped) - 0xDC00:02x} of the text is not UTF-8.")
    return Document(encodable(text, location), path, start)
