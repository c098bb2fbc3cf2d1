"""Characters inside of texts that say where the messages of a conversation and the spans of a template are."""

import re
from typing import Any, NamedTuple

from gregale.data.chat.turns import Content, Spans

# Unicode guarantees that no text has these characters: they are for the inside of programs.
MARK, OPEN, CLOSE, FROM = "\ufdd0\ufdd1\ufdd2\ufdd3"
OWN = re.compile("[\ufdd0-\ufdef]")
DIGITS = {ord(digit): 0xFDE0 + value for value, digit in enumerate("0123456789abcdef")}  # after `FROM`
MARKS = re.compile(f"({OPEN}|{CLOSE}|{FROM}[\ufde0-\ufdef]+)")
# Marks are in no tag and no number of a format: templates look for these.
WORD = re.compile(r"((?:(?<=[\s>])|\A)[^\s<|\[/{])")
LAST_WORD = re.compile(r"((?:(?<=\s)|\A)[^\s<>|\[\]/{}]+)(?=\s*\Z)")
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; templates read the first or second


class Marked(NamedTuple):
    """What the marks in a text say.

    - `text`: without the marks
    - `contents`: the begin of each word of a message, and the end of its last one
    - `calls`: indices of messages of which a called tool is in the text
    - `spans`: of `{% generation %}`
    """

    text: str
    contents: list[Content]
    calls: set[int]
    spans: Spans


def with_marks(message: dict[str, Any], number: int, in_empty: bool) -> dict[str, Any]:
    """Return a message with marks behind the first character of each word and behind the last word.

    - `in_empty`: an empty content has a mark, too
    """
    own, called = mark(2 * number), mark(2 * number + 1)
    texts = {name: within(message[name], own) for name in ("content", *REASONING) if name in message}
    if in_empty and message.get("content") == "":
        texts["content"] = own
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return {**message, **texts}
    return {**message, **texts, "tool_calls": [call_with_marks(each, called) for each in calls]}


def call_with_marks(call: Any, own: str) -> Any:
    """Return a call of a tool with marks in its name and its arguments."""
    if not isinstance(call, dict):
        return call
    inner = call.get("function")
    found = {name: within(call[name], own) for name in ("name", "arguments") if name in call}
    return {**call, **found, **({"function": call_with_marks(inner, own)} if inner else {})}


def within(value: Any, own: str) -> Any:
    """Return a value with marks in its texts; names and types of objects stay."""
    if isinstance(value, str):
        return LAST_WORD.sub(rf"\1{own}", WORD.sub(rf"\1{own}", value))
    if isinstance(value, list):
        return [within(each, own) for each in value]
    if isinstance(value, dict):
        return {name: each if name == "type" else within(each, own) for name, each in value.items()}
    return value


def mark(number: int) -> str:
    return FROM + f"{number:x}".translate(DIGITS)


def read_marks(marked: str) -> Marked:
    text, contents, calls, spans, opened, at = [], [], set(), [], 0, 0
    for number, part in enumerate(MARKS.split(marked)):
        if number % 2 == 0:
            text.append(part)
            at += len(part)
        elif part == OPEN:
            opened = at
        elif part == CLOSE:
            spans.append((opened, at))
        else:
            value = int("".join(f"{ord(digit) - 0xFDE0:x}" for digit in part[1:]), 16)
            contents.append(Content(at - 1, value // 2))
            calls |= {value // 2} if value % 2 else set()
    return Marked("".join(text), contents, calls, spans)
