"""The messages of a conversation for its template, and the turns that the template wrote of them.

A turn is what the iteration of its message in the template's loop wrote: without the header, which is what it has in
common with the generation prompt, and without the text of other messages, but with all tokens that end it.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple

Spans = list[tuple[int, int]]
SYMBOL = r"<[^<>\s]+>|\[[^\[\]\s]+\]|\w+|."  # texts are compared by these: no header ends inside of one


class Part(NamedTuple):
    """What a template wrote at once.

    - `owner`: index of the message whose iteration of a loop wrote it; None: there is none
    - `outer`: the message of the outermost loop, in whose iteration that of the owner may run
    """

    text: str
    owner: int | None
    outer: int | None


class Content(NamedTuple):
    """A character of a message in a text: its index there, and the index of the message."""

    at: int
    message: int


class NotCertain(Exception):
    """Which tokens the assistant wrote cannot be told."""


class AssistantTurns:
    """The turns in the text of a conversation.

    - `parts`: of the text
    - `contents`: the begin of each word of a message and the end of its last one, in order
    - `prompt(message)`: the generation prompt before a message
    - `special`: a regular expression of the special tokens
    - `stop`: the token that ends generation by the tokenizer's configuration; empty: not known
    """

    def __init__(
        self,
        parts: Sequence[Part],
        contents: Sequence[Content],
        prompt: Callable[[int], str],
        special: re.Pattern[str],
        stop: str = "",
    ):
        self._text, self._contents = "".join(part.text for part in parts), contents
        self._prompt, self._special, self._stop = prompt, special, stop
        self.own: dict[int, list[int]] = {}  # by message, where its text is
        for at, message in contents:
            self.own.setdefault(message, []).append(at)
        self._written: dict[int, list[tuple[int, int]]] = {}  # by message, the spans that its iteration wrote
        self._nested, first = set(), 0  # where the text of a message begins inside of another's iteration
        for part in parts:
            end = first + len(part.text)
            if part.text and part.owner is not None:
                spans = self._written.setdefault(part.owner, [])
                begin = spans.pop()[0] if spans and spans[-1][1] == first else first
                spans.append((begin, end))
                if part.owner != part.outer:
                    self._nested.add(first)
            first = end

    def spans(self, message: int) -> Spans:
        """Return the spans of the turn of a message; raise `NotCertain`."""
        own, written, prompt = self.own.get(message, []), self._written.get(message, []), self._prompt(message)
        if own and not any(first <= at < end for at in own for first, end in written):
            written = [self._around(own, prompt)]
        elif not written and not self._written:
            raise NotCertain
        elif not written:
            return []
        (first, end), *more = written
        content = next((at for at in own if first <= at < end), end)
        start = first + self._header(self._text[first:content], prompt)
        if start < first + len(prompt) and self._begin_of(prompt) in self._symbols(self._text[start:content]):
            raise NotCertain  # a header that is not this one
        written = [(start, end), *more]
        first, end = written[-1]
        after = max((at + 1 for at in own if first <= at < end), default=first)
        written[-1] = first, self._end(after, end, prompt)
        written = [span for each in written for span in self._stopped(*each)]
        found = [(first, end) for first, end in written if first < end]
        for first, end in found:
            inside = self._contents[bisect_left(self._contents, (first,)) : bisect_left(self._contents, (end,))]
            if any(each.message != message for each in inside):
                raise NotCertain
        return found

    def _header(self, text: str, prompt: str) -> int:
        """Return the length of the header that a turn begins with; `text`: the turn up to the message's own text."""
        if prompt and prompt in text:
            return text.index(prompt) + len(prompt)
        symbols, wanted = self._symbols(text.lstrip()), self._symbols(prompt)
        # The prompt may begin with what ends the message before.
        same = max((common(symbols, wanted[skipped:]) for skipped in range(len(wanted))), default=0)
        return same and same + len(text) - len(text.lstrip())

    def _stopped(self, first: int, end: int) -> Spans:
        """Return what is left of a span without the special tokens behind a stop, which the model does not write."""
        bounds = [first]
        for each in self._special.finditer(self._text, first, end) if self._stop else ():
            if each[0] != self._stop and self._text.endswith(self._stop, 0, each.start()):
                bounds += each.span()
        return list(zip(bounds[::2], [*bounds[1::2], end], strict=True))

    def _around(self, own: Sequence[int], prompt: str) -> tuple[int, int]:
        """Return the span of a turn with its header that no iteration wrote, by what is around the message's text."""
        before = max((each.at + 1 for each in self._contents if each.at < own[0]), default=0)
        behind = min((each.at for each in self._contents if each.at > own[-1]), default=len(self._text))
        first = self._text.rfind(self._begin_of(prompt), before, own[0])
        end = self._special.search(self._text, own[-1], behind)
        if not prompt.strip() or first < 0 or not (end or behind == len(self._text)):
            raise NotCertain
        return first, end.end() if end else behind

    def _end(self, after: int, end: int, prompt: str) -> int:
        """Return the end of a turn whose iteration wrote up to `end`, and whose message's text ends before `after`."""
        tail = self._text[after:end].rstrip()
        if any(each.end() == len(tail) for each in self._special.finditer(tail)):
            return after + len(tail)
        behind = next((at for at in range(end, len(self._text)) if not self._text[at].isspace()), end)
        found = self._special.match(self._text, behind)
        if found and end not in self._nested and not self._begins(prompt, found[0]):
            return found.end()  # the next message begins with the token that ends this one
        return after + len(tail) if tail else end

    def _begins(self, prompt: str, name: str) -> bool:
        """Return whether a special token is an assistant's header, and does not end the message before."""
        prompt = prompt.lstrip()
        others = {each[0] for each in self._special.finditer(prompt)} - {name}
        return prompt.startswith(name) and not any(each in self._text.partition(name)[0] for each in others)

    def _begin_of(self, prompt: str) -> str:
        """Return the first symbol of a generation prompt, spaces apart."""
        return next((each for each in self._symbols(prompt) if each.strip()), "\0")

    def _symbols(self, text: str) -> list[str]:
        return symbols_of(text, self._special)


def symbols_of(text: str, special: re.Pattern[str]) -> list[str]:
    return [each[0] for each in symbol_of(special).finditer(text)]


@cache
def symbol_of(special: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(f"{special.pattern}|{SYMBOL}", re.DOTALL)


def common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the number of characters of the symbols that both begin with."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(len(one) for one, _ in same)


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
