"""The messages that templates get, with characters in their texts that say where they and spans are in an output."""

import json
import re
from typing import Any, NamedTuple

from gregale.data.chat.turns import Content, Spans

# Unicode guarantees that no text has these characters: they are for the inside of programs.
MARK, OPEN, CLOSE, FROM = "\ufdd0\ufdd1\ufdd2\ufdd3"
OWN = re.compile("[\ufdd0-\ufdef]")
DIGITS = {ord(digit): 0xFDE0 + value for value, digit in enumerate("0123456789abcdef")}  # after `FROM`
MARKS = re.compile(f"({OPEN}|{CLOSE}|{FROM}[\ufde0-\ufdef]+)")
# Marks are behind a text's first character, behind that of a word now and then, and behind its last one.
WORD = r"(?:(?<=[\s>])|\A)[^\s<|\[/{]"
PLACES = [  # the next ones serve templates that look for a tag or a number of a format, where the first ones put a mark
    (re.compile(rf"((?:{WORD}|\A\s*\S))((?s:.{{0,500}}))"), re.compile(r"(\S)(?=\s*\Z)")),
    (re.compile(rf"({WORD})((?s:.{{0,500}}))"), re.compile(r"([^\s>\]])(?=\s*\Z)")),
    (re.compile(rf"({WORD})((?s:.{{0,500}}))"), re.compile(r"((?:(?<=\s)|\A)[^\s<>|\[\]/{}]+)(?=\s*\Z)")),
]
Places = tuple[re.Pattern[str], re.Pattern[str]]
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; templates read the first or second

Messages = list[dict[str, Any]]


class Marked(NamedTuple):
    """What the marks in a text say.

    - `text`: without the marks
    - `contents`: where marks of messages are
    - `calls`: indices of messages of which a called tool is in the text
    - `spans`: of `{% generation %}`
    """

    text: str
    contents: list[Content]
    calls: set[int]
    spans: Spans


def with_marks(message: dict[str, Any], number: int, in_empty: bool, places: Places) -> dict[str, Any]:
    """Return a message with marks at some `PLACES` of its texts.

    - `in_empty`: an empty content has a mark, too
    """
    own, calls = mark(2 * number), message.get("tool_calls")
    found = {name: within(message[name], own, places) for name in ("content", *REASONING) if name in message}
    if calls:
        found["tool_calls"] = within(calls, mark(2 * number + 1), places)
    elif in_empty and message.get("content") == "":
        found["content"] = own
    return {**message, **found}


def within(value: Any, own: str, places: Places, name: str = "") -> Any:
    """Return a value with marks in its texts; `name`: of the field that has it."""
    if isinstance(value, str) and name not in ("id", "type"):
        word, last = places
        return last.sub(rf"\1{own}", word.sub(rf"\1{own}\2", value))
    if isinstance(value, list):
        return [within(each, own, places) for each in value]
    if isinstance(value, dict):
        return {each: within(inner, own, places, each) for each, inner in value.items()}
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


def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Return a value as the filter of transformers does; own characters stay as they are."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return (
        re.sub(r"[^\x00-\x7f\ufdd0-\ufdef]", lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text
    )


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as transformers gives it to templates: no null, the reasoning by the names of all models."""
    kept = {name: value for name, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in REASONING if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def is_text(content: Any) -> bool:
    """Return whether a message has text that no template leaves out, as some do with thoughts."""
    return isinstance(content, str) and content.strip()[-1:] not in ("", ">", "]")


def chosen(messages: Messages, loss_on: str) -> list[int]:
    """Return the indices of the assistant's messages that the loss is on."""
    roles = [each.get("role") for each in messages]
    first = 0 if loss_on != "completion" or "user" not in roles else len(roles) - roles[::-1].index("user")
    turns = [number for number in range(first, len(roles)) if roles[number] == "assistant"]
    return turns[-1:] if loss_on == "last" else turns
