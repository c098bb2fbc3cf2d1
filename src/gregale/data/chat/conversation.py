"""Conversations, and the forms of rows that have them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ASSISTANT, LAST, COMPLETION, ALL = LOSS_ON = ("assistant", "last", "completion", "all")


@dataclass(frozen=True)
class Conversation:
    """A conversation that a chat template makes a text of.

    - `text`: JSON of an object with `messages` and, if there are any, `tools` and `documents`
    - `content`: the messages' own text, which a tokenizer is trained on
    - `location`: where it was read, for messages
    - `loss_on`: the messages that the loss is on, see `ChatRows`
    - `date`: what the template's `strftime_now` formats, YYYY-MM-DD
    """

    text: str
    content: str
    location: str
    loss_on: str
    date: str

    def __len__(self) -> int:
        """Return the length of the JSON; a conversation is never empty."""
        return len(self.text)


@dataclass(frozen=True)
class Pair:
    """Two conversations with the same prompt, of which somebody prefers the first: two adjacent documents."""

    chosen: Conversation
    rejected: Conversation

    @property
    def content(self) -> str:
        return f"{self.chosen.content}\n{self.rejected.content}"

    @property
    def location(self) -> str:
        return self.chosen.location

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


MESSAGES, SHAREGPT, PROMPT, INSTRUCTION, PAIRS = ("messages", "sharegpt", "prompt", "instruction", "pairs")
ROLES = {  # by their spellings, without spaces around and in small letters
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatbot"), "assistant"),
    "system": "system",
}
OF_TOOLS = dict.fromkeys(("tool", "observation", "function_response"), "tool")  # of ShareGPT
CALL = "function_call"  # a turn of ShareGPT's in which the assistant calls tools
COLUMNS = {  # by form, the columns of a row and the fields of a message
    MESSAGES: ("messages", "tools", "documents", "role", "content"),
    SHAREGPT: ("conversations", "system", "tools", "from", "value"),
    PROMPT: ("prompt", "completion", "system", "tools", "role", "content"),
    INSTRUCTION: ("instruction", "input", "output", "system"),
    PAIRS: ("prompt", "chosen", "rejected", "system", "tools", "role", "content"),
}
Messages = list[dict[str, Any]]


class Malformed(ValueError):
    """A row that has no conversation."""


class Row:
    """A row of a data set, or a message in it, with own names for the usual ones in `names`."""

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str]):
        self.values, self._names = values, names

    def name(self, usual: str) -> str:
        return self._names.get(usual, usual)

    def get(self, usual: str) -> Any:
        return self.values.get(self.name(usual))

    def text(self, usual: str) -> str:
        if not isinstance(found := self.get(usual), str):
            raise self._wrong(usual, "text")
        return found

    def rows(self, usual: str) -> list["Row"]:
        """Return a column's objects, which may be JSON in a text; raise `Malformed` if there are none."""
        found = self.get(usual)
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except (ValueError, RecursionError) as error:
                raise Malformed(f"`{self.name(usual)}` is text, and no JSON ({error})") from None
        if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
            raise self._wrong(usual, "a list of objects")
        return [Row(each, self._names) for each in found]

    def message(self) -> dict[str, Any]:
        """Return a message with the usual names; fields that have no name here stay."""
        own = {self.name("role"): "role", self.name("content"): "content"}
        message = {own.get(name, name): value for name, value in self.values.items()}
        message["role"] = self.role("role", ROLES)
        if isinstance(calls := message.get("tool_calls"), str):
            has_calls = calls.strip() not in ("", "[]", "null")  # in columns of text
            message["tool_calls"] = [each.values for each in self.rows("tool_calls")] if has_calls else None
        if isinstance(parts := message.get("content"), list):
            return {**message, "content": "".join(self._text_of(each) for each in parts)}
        if message.get("content") is not None or not message.get("tool_calls"):
            self.text("content")
        return message

    def role(self, usual: str, known: Mapping[str, str]) -> str:
        """Return the role that a field names; one that is not known is as it was given, for the template to judge."""
        found = self.text(usual)
        return known.get(found.strip().lower(), found)

    def _text_of(self, part: Any) -> str:
        """Return the text of a part of a message's content."""
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            return part["text"]
        kind = repr(part.get("type")) if isinstance(part, dict) else type(part).__name__
        raise Malformed(f"`{self.name('content')}` has a part of type {kind}; models here read parts of type 'text'")

    def _wrong(self, usual: str, expected: str) -> Malformed:
        found, names = type(self.get(usual)).__name__, ", ".join(map(str, self.values)) or "none"
        if self.get(usual) is None:
            return Malformed(f"no `{self.name(usual)}`; there are: {names}")
        return Malformed(f"`{self.name(usual)}` is {found if self.get(usual) else 'empty'}, expected {expected}")


def from_messages(row: Row) -> Messages:
    return [each.message() for each in row.rows("messages")]


def from_sharegpt(row: Row) -> Messages:
    turns = [
        (each.role("from", {**ROLES, **OF_TOOLS, CALL: CALL}), each.text("value")) for each in row.rows("conversations")
    ]
    return with_system(row, [calls_of(text) if role == CALL else say(role, text) for role, text in turns])


def calls_of(text: str) -> dict[str, Any]:
    """Return the message of an assistant that calls tools: JSON of `name` and `arguments`, or a list of such."""
    try:
        found = json.loads(text)
        calls = [dict(each) for each in (found if isinstance(found, list) else [found])]
        for call in calls:  # arguments may be JSON in a text once more
            given = call.get("arguments")
            call["arguments"] = json.loads(given) if isinstance(given, str) else given
    except (ValueError, TypeError, RecursionError) as error:
        raise Malformed(f"a {CALL} is no JSON of objects ({error})") from None
    named = [isinstance(each.get("name"), str) and isinstance(each["arguments"], dict) for each in calls]
    if not all(named) or not named:
        raise Malformed(f"a {CALL} is no object with a text `name` and an object `arguments`, and no list of such")
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": each} for each in calls],
    }


def from_prompt(row: Row) -> Messages:
    return with_system(row, [*part_of(row, "prompt", "user"), *part_of(row, "completion", "assistant")])


def part_of(row: Row, name: str, role: str) -> Messages:
    """Return the messages of a column, or its text as a message of a role."""
    is_text = isinstance(row.get(name), str)
    return [say(role, row.text(name))] if is_text else [each.message() for each in row.rows(name)]


def from_pair(row: Row) -> list[Messages]:
    """Return the chosen and the rejected conversation, of one prompt, which `chosen` and `rejected` may begin with."""
    prompt = part_of(row, "prompt", "user") if row.get("prompt") else []
    found = [part_of(row, name, "assistant") for name in ("chosen", "rejected")]
    texts = [row.get(name) for name in ("prompt", "chosen", "rejected")]
    if all(isinstance(each, str) for each in texts) and all(begins_with(each, texts[0]) for each in texts[1:]):
        raise Malformed(
            f"`{row.name('chosen')}` and `{row.name('rejected')}` begin with the text of `{row.name('prompt')}`, and "
            "whether they repeat it is not certain. Take it out of the answers, or give all three as messages"
        )
    found = [with_prompt(row, prompt, each) for each in found]
    if prompt_of(found[0]) != prompt_of(found[1]):
        raise Malformed(
            f"`{row.name('chosen')}` and `{row.name('rejected')}` differ before the user's last message ends"
        )
    return [with_system(row, each) for each in found]


def begins_with(text: str, prompt: str) -> bool:
    """Return whether a text begins with the whole words of a prompt."""
    return text.startswith(prompt) and not (prompt[-1:].isalnum() and text[len(prompt) :][:1].isalnum())


def with_prompt(row: Row, prompt: Messages, answer: Messages) -> Messages:
    """Return the messages of a prompt and an answer, which may begin with the prompt."""
    if all(each["role"] in ("assistant", "tool") for each in answer) and answer[: len(prompt)] != prompt:
        return [*(prompt or part_of(row, "prompt", "user")), *answer]
    own = answer[1:] if answer[0]["role"] == "system" and prompt[:1] != answer[:1] else answer
    if own[: len(prompt)] != prompt:
        raise Malformed(f"`{row.name('prompt')}` is another one than the answers begin with; leave one of them out")
    return answer


def prompt_of(messages: Messages) -> Messages:
    """Return the messages up to the user's last one."""
    users = [number for number, each in enumerate(messages) if each["role"] == "user"]
    return messages[: users[-1] + 1] if users else []


def from_instruction(row: Row) -> Messages:
    asked = "\n\n".join([row.text("instruction"), *([row.text("input")] if row.get("input") else [])])
    return with_system(row, [say("user", asked), say("assistant", row.text("output"))])


def with_system(row: Row, messages: Messages) -> Messages:
    """Return messages after that of the column `system`, which they may begin with; raise `Malformed` for two."""
    own = [say("system", row.text("system"))] if row.get("system") else []
    if own and messages[0]["role"] == "system" and messages[:1] != own:
        raise Malformed(f"`{row.name('system')}` is another text than the system's message")
    return messages if messages[:1] == own else [*own, *messages]


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


FORMS: dict[str, Callable[[Row], list[Messages]]] = {  # two conversations of a row are a pair
    MESSAGES: lambda row: [from_messages(row)],
    SHAREGPT: lambda row: [from_sharegpt(row)],
    PROMPT: lambda row: [from_prompt(row)],
    INSTRUCTION: lambda row: [from_instruction(row)],
    PAIRS: from_pair,
}
