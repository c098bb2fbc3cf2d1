"""CSV and TSV files, plain or compressed."""

import csv
import re
import sys
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
        if not self.header and not re.fullmatch("0*[1-9][0-9]*", self.column):
            raise KeyedError("column", f"is {self.column!r}", ", but header is false: give its number, from 1.")

    def scan(self, part: SourceRange) -> Iterator[Document | BadDocument]:
        csv.field_size_limit(sys.maxsize)  # of this process; 131,072 characters by default
        quoting = csv.QUOTE_MINIMAL if self.quotes else csv.QUOTE_NONE
        found = self.records(csv.reader(lines_of(part), delimiter=self.delimiter, quoting=quoting, strict=True))
        place, count = self.place_in(next(found, None), part.path) if self.header else (int(self.column) - 1, None)
        for line, record in found:
            if isinstance(record, str):
                yield BadDocument(f"{part.path}, line {line}: {record}")
            elif len(record) <= place or (count is not None and len(record) != count):
                expected = f"expected {count}, as the header" if count else f"expected column {self.column}"
                yield BadDocument(f"{part.path}, line {line}: {len(record)} values, {expected}.")
            else:
                yield document(record[place], part.path, line)

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

    def place_in(self, header: tuple[int, list[str] | str] | None, path: str) -> tuple[int, int]:
        """Return the index of the column, and the number of columns."""
        if header is None:
            raise BadDocument(f"{path}: empty, expected a header with the columns' names.")
        if isinstance(names := header[1], str):
            raise BadDocument(f"{path}, line {header[0]}: {names}")
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


def lines_of(part: SourceRange) -> Iterator[str]:
    """Yield the lines of a file as text; bytes that are not UTF-8 stay escaped."""
    for start, line in pieces_of_part(part, b"\n"):
        line = line.removeprefix(BYTE_ORDER_MARK) if start == 0 else line
        yield line.decode("utf-8", "surrogateescape") + "\n"


def document(text: str, path: str, line: int) -> Document | BadDocument:
    """Return a value as a document if it is UTF-8."""
    location = f"{path}, line {line}"
    escaped = next((each for each in text if "\udc80" <= each <= "\udcff"), None)
    if escaped is not None:
        return BadDocument(f"{location}: the byte 0x{ord(escaped) - 0xDC00:02x} of the text is not UTF-8.")
    return Document(encodable(text, location), path, line)
