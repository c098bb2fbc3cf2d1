"""Sources of text files: plain text, JSON lines and CSV."""

import csv
import json
import re
import sys
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from gregale.data.chat.conversation import Conversation, Pair
from gregale.data.sources.base import (
    BYTE_ORDER_MARK,
    READ_BYTES,
    BadDocument,
    Document,
    FileSource,
    SourceConfig,
    SourceRange,
    compression_of,
    encodable,
    opened,
    pieces_of_part,
    readable,
    text_ranges,
    unpacked,
)
from gregale.errors import KeyedError, UserError
from gregale.settings import restated, setting

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


FIELDS_SHOWN = 20


@dataclass(frozen=True)
class JsonLines(FileSource):
    """One JSON object a line, plain or compressed (.gz, .zst, .bz2, .xz)."""

    def split(self, path: str, size: int) -> list[SourceRange]:
        return text_ranges(path, size, PART_BYTES)

    def scan(self, part: SourceRange) -> Iterator[Document | BadDocument]:
        first = None  # the offset of the first of these lines
        for number, (start, line) in enumerate(pieces_of_part(part, b"\n"), 1):
            first = start if first is None else first
            content = line.removeprefix(BYTE_ORDER_MARK)
            if content.strip():
                try:
                    location = Line(part.path, first, number)
                    record = record_of(content, location, self.expected)
                    yield Document(self.content_of(record, location), part.path, start)
                except BadDocument as bad:
                    yield bad

    @property
    @abstractmethod
    def expected(self) -> str:
        """Return the fields that an object has to have, for messages."""

    @abstractmethod
    def content_of(self, record: dict[str, Any], location: object) -> str | Conversation | Pair:
        """Return the document of an object; raise `BadDocument` if it has none."""


@SourceConfig.register_subclass("jsonl")
@dataclass(frozen=True)
class JsonLinesSource(JsonLines):
    """One JSON object a line, plain or compressed (.gz, .zst, .bz2, .xz), its text in one field."""

    field: str = setting("text", "name of the field that holds a document's text; `a.b` is field `b` inside of `a`")

    @property
    def expected(self) -> str:
        return f"field `{self.field}`"

    def content_of(self, record: dict[str, Any], location: object) -> str:
        value, level = record, "this line"
        for name in [self.field] if self.field in record else self.field.split("."):
            if not isinstance(value, dict) or name not in value:
                found = ", ".join(list(value)[:FIELDS_SHOWN]) if isinstance(value, dict) else ""
                raise BadDocument(f"{location}: no field `{self.field}`; the fields of {level} are: {found or 'none'}.")
            value, level = value[name], f"`{name}`"
        if not isinstance(value, str):
            raise BadDocument(f"{location}: field `{self.field}` is {type(value).__name__}, expected text.")
        return encodable(value, location)


def record_of(line: bytes, location: object, expected: str) -> dict[str, Any]:
    """Return the object of one line of JSON; raise `BadDocument` if it has none."""
    record = parsed(line, location)
    if not isinstance(record, dict):
        found = type(record).__name__
        raise BadDocument(f"{location}: found {found}, expected a JSON object with {expected}.{array_advice(line)}")
    return record


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
        raise BadDocument(f"{location}: not JSON ({error.msg} at column {error.colno}).{array_advice(line)}") from error
    except RecursionError as error:
        raise BadDocument(f"{location}: the JSON is nested too deeply.") from error


def array_advice(line: bytes) -> str:
    """Return a sentence about a line that begins a JSON array."""
    is_array = line.lstrip().startswith(b"[")
    return " It begins a JSON array: `jq -c '.[]' OLD > NEW` writes its elements one a line." if is_array else ""


@dataclass(frozen=True)
class Line:
    """The location of a line: the `number`-th from byte `first` on. The line number is counted when it is printed."""

    path: str
    first: int
    number: int

    def __str__(self) -> str:
        return f"{self.path}, line {newlines_before(self.path, self.first) + self.number}"


@lru_cache(maxsize=8)  # the lines of one range are counted from the same offset
def newlines_before(path: str, stop: int) -> int:
    """Return the number of newlines in the first `stop` bytes of a file."""
    count = 0
    with readable(path), opened(path) as file:
        while (left := stop - file.tell()) > 0 and (block := file.read(min(left, READ_BYTES))):
            count += block.count(b"\n")
    return count


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
