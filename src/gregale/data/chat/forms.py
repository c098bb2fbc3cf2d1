"""The forms in which data sets have conversations: rows become messages with `role` and `content`."""

import json
from collections.abc import Callable, Mapping
from typing import Any

MESSAGES, SHAREGPT, PROMPT, INSTRUCTION = ("messages", "sharegpt", "prompt", "instruction")
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
COLUMNS = {  # by form, the columns of a row and the fields of a message
    MESSAGES: ("messages", "tools", "documents", "role", "content"),
    SHAREGPT: ("conversations", "system", "tools", "from", "value"),
    PROMPT: ("prompt", "completion", "system", "tools", "role", "content"),
    INSTRUCTION: ("instruction", "input", "output", "system"),
}
Messages = list[dict[str, Any]]


class Malformed(ValueError):
    """A row that has no conversation."""


class Row:
    """A row of a data set, read by the usual names of columns and fields.

    - `values`: by the row's own names
    - `names`: own names by the usual ones
    """

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str]):
        self._values, self._names = values, names

    def name(self, usual: str) -> str:
        return self._names.get(usual, usual)

    def get(self, usual: str) -> Any:
        """Return the value of a column; None if it is missing."""
        return self._values.get(self.name(usual))

    def needed(self, usual: str) -> Any:
        """Return the value of a column; raise `Malformed` if it is missing or null."""
        if (found := self.get(usual)) is None:
            raise Malformed(f"no `{self.name(usual)}`; the columns are: {', '.join(map(str, self._values)) or 'none'}")
        return found

    def text(self, usual: str) -> str:
        if not isinstance(found := self.needed(usual), str):
            raise Malformed(f"`{self.name(usual)}` is {type(found).__name__}, expected text")
        return found

    def objects(self, usual: str) -> list[dict[str, Any]]:
        """Return a column's objects, which may be JSON in a text."""
        found = self.needed(usual)
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except ValueError as error:
                raise Malformed(f"`{self.name(usual)}` is text, and no JSON ({error})") from None
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found) or not found:
            raise Malformed(f"`{self.name(usual)}` is no list of objects, or empty")
        return found


def from_messages(row: Row) -> Messages:
    return [message_of(each, row) for each in row.objects("messages")]


def from_sharegpt(row: Row) -> Messages:
    found = []
    for each in row.objects("conversations"):
        role, text = each.get(row.name("from")), each.get(row.name("value"))
        if role not in ROLES:
            raise Malformed(f"`{row.name('from')}` is {role!r}, and none of {', '.join(ROLES)}")
        if not isinstance(text, str):
            raise Malformed(f"`{row.name('value')}` is {type(text).__name__}, expected text")
        found.append({"role": ROLES[role], "content": text})
    return [*system_of(row), *found]


def from_prompt(row: Row) -> Messages:
    parts = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        if isinstance(row.needed(name), str):
            parts.append({"role": role, "content": row.text(name)})
        else:
            parts += [message_of(each, row) for each in row.objects(name)]
    return [*system_of(row), *parts]


def from_instruction(row: Row) -> Messages:
    asked = [row.text("instruction"), *([row.text("input")] if row.get("input") else [])]
    answer = {"role": "assistant", "content": row.text("output")}
    return [*system_of(row), {"role": "user", "content": "\n\n".join(asked)}, answer]


def system_of(row: Row) -> Messages:
    return [{"role": "system", "content": row.text("system")}] if row.get("system") else []


def message_of(given: Mapping[str, Any], row: Row) -> dict[str, Any]:
    """Return a message with the usual names; fields that have no name here stay."""
    own = {row.name("role"): "role", row.name("content"): "content"}
    message = {own.get(name, name): value for name, value in given.items()}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise Malformed(f"a message without the text `{row.name('role')}`")
    if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise Malformed(f"`{row.name('content')}` of a message is {type(content).__name__}, expected text")
    return message


FORMS: dict[str, Callable[[Row], Messages]] = {
    MESSAGES: from_messages,
    SHAREGPT: from_sharegpt,
    PROMPT: from_prompt,
    INSTRUCTION: from_instruction,
}
