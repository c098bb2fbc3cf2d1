"""JSON lines, plain or compressed."""

import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gregale.data.chat.conversation import Conversation, Pair
from gregale.data.sources.base import (
    BYTE_ORDER_MARK,
    BadDocument,
    Document,
    FileSource,
    SourceConfig,
    SourceRange,
    encodable,
)
from gregale.data.sources.compression import READ_BYTES, pieces_of_part, text_ranges
from gregale.data.sources.files import opened, readable
from gregale.settings import setting

PART_BYTES = 8 << 20
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
