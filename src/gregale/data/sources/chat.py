"""Sources of conversations, by format of their files."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from gregale.data.chat.conversation import (
    ALL,
    ASSISTANT,
    COLUMNS,
    COMPLETION,
    FORMS,
    LOSS_ON,
    MESSAGES,
    PAIRS,
    Conversation,
    Malformed,
    Pair,
    Row,
)
from gregale.data.sources.base import FIT, BadDocument, Document, Needless, SourceConfig, encodable
from gregale.data.sources.tables import HuggingFaceRows, ParquetRows
from gregale.data.sources.text import CsvRecords, JsonLines, invalid_byte
from gregale.errors import KeyedError
from gregale.settings import Settings, restated, setting

OPTIONAL = ("tools", "documents")  # what a template gets beside the messages


@dataclass(frozen=True)
class ChatRows(Settings):
    """Rows with a conversation each.

    The loss is on the tokens of the assistant's messages (`assistant`), of the last of them, of those after the user's
    last message (`completion`), or on all tokens. Of pairs it is on `completion`.
    """

    has_conversations = True

    packing: str = restated(SourceConfig, "packing", FIT)
    form: str = setting(MESSAGES, "columns that rows have", choices=tuple(FORMS), by_topic=True)
    columns: dict[str, str] = setting(dict, "names in these files, as {messages: chat, content: text}", by_topic=True)
    loss_on: str = setting(ASSISTANT, "messages that the loss is on", choices=LOSS_ON, by_topic=True)
    date: str = setting("2025-01-01", "today, for templates that write it: YYYY-MM-DD", by_topic=True)

    def __post_init__(self):
        super().__post_init__()
        known = COLUMNS[self.form]
        if unknown := [name for name in self.columns if name not in known]:
            raise KeyedError(f"columns.{unknown[0]}", "is no name", f" in the form {self.form}: {', '.join(known)}.")
        try:
            date.fromisoformat(self.date)
        except ValueError:
            raise KeyedError("date", f"is {self.date!r}", "; give a day as 2025-01-31.") from None
        if self.form == PAIRS and self.loss_on not in (ASSISTANT, COMPLETION):
            raise KeyedError(
                "loss_on", f"is {self.loss_on}", f", but pairs have their loss on {COMPLETION}. Leave it out."
            )

    @property
    def rows_together(self) -> int:
        return 2 if self.form == PAIRS else 1

    @property
    def has_masks(self) -> bool:
        return self.loss_on != ALL

    def conversation(self, values: Mapping[str, Any], location: object) -> Conversation | Pair:
        """Return the conversation of a row, or the pair; raise `BadDocument` if it has none."""
        row = Row(values, self.columns)
        try:
            found = FORMS[self.form](row)
            beside = {name: [each.values for each in row.rows(name)] for name in OPTIONAL if row.get(name)}
        except Malformed as error:
            raise BadDocument(f"{location}: {error}.") from None

        def made(messages: list[dict[str, Any]]) -> Conversation:
            text = encodable(json.dumps({"messages": messages, **beside}, ensure_ascii=False), location)
            content = "\n".join(each["content"] for each in messages if each.get("content"))
            return Conversation(text, content, str(location), COMPLETION if len(found) > 1 else self.loss_on, self.date)

        if len(found) > 1 and found[0] == found[1]:
            raise Needless(f"{location}: the chosen and the rejected answer are equal.")
        return Pair(*map(made, found)) if len(found) > 1 else made(found[0])

    def document_of(self, values: Mapping[str, Any], location: str, path: str, start: int) -> Document | BadDocument:
        try:
            return Document(self.conversation(values, location), path, start)
        except BadDocument as bad:
            return bad


@SourceConfig.register_subclass("chat")
@dataclass(frozen=True)
class ChatSource(ChatRows, JsonLines):
    """Conversations, a JSON object a line, plain or compressed (.gz, .zst, .bz2, .xz)."""

    @property
    def expected(self) -> str:
        return f"a conversation of the form {self.form}"

    def content_of(self, record: dict[str, Any], location: object) -> Conversation | Pair:
        return self.conversation(record, location)


@SourceConfig.register_subclass("chat_csv")
@dataclass(frozen=True)
class ChatCsvSource(ChatRows, CsvRecords):
    """Conversations, a record of comma-separated values each; lists of messages are JSON in a value."""

    def document(self, record: list[str], names: list[str], path: str, line: int) -> Document | BadDocument:
        location = f"{path}, line {line}"
        invalid = next((bad for value in record if (bad := invalid_byte(value, location))), None)
        return invalid or self.document_of(dict(zip(names, record, strict=True)), location, path, line)


@SourceConfig.register_subclass("chat_parquet")
@dataclass(frozen=True)
class ChatParquetSource(ChatRows, ParquetRows):
    """Conversations, a row of Parquet files each. Needs the extra `formats` (pyarrow)."""

    def reader(self, schema, path: str) -> tuple[list[str], Callable[[Any], Iterable]]:
        wanted = {self.columns.get(name, name) for name in COLUMNS[self.form]}
        return [str(name) for name in schema.names if name in wanted], lambda rows: rows

    def document(self, value, path: str, row: int) -> Document | BadDocument:
        try:
            return self.document_of(without_null(value.as_py()), f"{path}, row {row}", path, row)
        except UnicodeDecodeError:
            return BadDocument(f"{path}, row {row}: not UTF-8.")


@SourceConfig.register_subclass("chat_huggingface")
@dataclass(frozen=True)
class ChatHuggingFaceSource(ChatRows, HuggingFaceRows):
    """Conversations, a row each of a data set of the `datasets` library. Needs the extra `hf`."""

    def document(self, value: dict[str, Any], path: str, row: int) -> Document | BadDocument:
        return self.document_of(without_null(value), f"{path}, row {row}", path, row)


def without_null(value: Any) -> Any:
    """Return a value of a table without null fields: all rows of one have the fields of each."""
    if isinstance(value, dict):
        return {name: without_null(each) for name, each in value.items() if each is not None}
    return [without_null(each) for each in value] if isinstance(value, list) else value
