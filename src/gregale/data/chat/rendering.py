"""Provides the process that evaluates chat templates, which are programs of others.

`gregale.data.chat.renderer` starts this file and ends the process. It reads JSON, a line each: first the templates and
limits, then conversations. It answers each line with a line. It imports only Jinja and Python's own modules, so it
starts fast.

Limits of processor time and memory are the system's. So a template that never ends, in whatever expression, ends the
process and nothing else.
"""

import json
import re
import resource
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Unicode guarantees that no text has these characters: they are for the inside of programs.
MARK, OPEN, CLOSE, FIRST, LAST = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4"
OWN = re.compile(f"[{MARK}{OPEN}{CLOSE}{FIRST}{LAST}]")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; templates read the first or second

Spans = list[tuple[int, int]]


class Refused(Exception):
    """The template cannot be used, whatever the conversation."""


class Generation(Extension):
    """The block `{% generation %}`: its output is between `OPEN` and `CLOSE`."""

    tags = {"generation"}  # noqa: RUF012 -- a class variable of Jinja's

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

    def _between(self, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def environment(date: Callable[[], str]) -> ImmutableSandboxedEnvironment:
    """Return the environment in which transformers evaluates chat templates; `date`: what `strftime_now` formats."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.fromisoformat(date()).strftime(form)
    return made


class Templates:
    """The templates of a tokenizer.

    - `text`, `tool_use`: sources; the second is for conversations with tools
    - `variables`: what templates call the special tokens
    - `names`: the special tokens
    - `seconds`, `characters`: limits of one rendering: processor time, and the length of its text
    """

    def __init__(
        self, text: str, tool_use: str, variables: dict[str, str], names: list[str], seconds: int, characters: int
    ):
        self._date, self._variables, self._seconds, self._characters = "", variables, seconds, characters
        limit_time(seconds)  # constants are computed when a template is compiled
        made = environment(lambda: self._date)
        self._templates = [made.from_string(each) for each in (text, tool_use or text)]
        self._has_spans = [bool(GENERATION.search(each)) for each in (text, tool_use or text)]
        self._names = re.compile(f"({'|'.join(sorted(map(re.escape, names), key=len, reverse=True)) or '(?!)'})")

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the text of a conversation and the spans that the loss is on, as indices of characters.

        The text is in pieces: the second, fourth and so on are special tokens. Inside of `answer`, each name of a
        special token in the conversation has `MARK` after its first character, so that it is none of these.
        """
        conversation, self._date = self._marked(asked["conversation"]), asked["date"]
        messages, has_tools = [self._plain(each) for each in conversation.pop("messages")], "tools" in conversation
        render = partial(self._render, conversation, has_tools)
        marked = render(messages, asked["prompt"])
        text, spans = without_spans(marked), []
        probed = [with_probed_calls(each) for each in messages]
        if probed != messages and render(probed, asked["prompt"]) == marked:
            raise_exception("it leaves out the calls of tools")
        supervised = [] if asked["prompt"] else chosen(messages, asked["loss_on"])
        if asked["loss_on"] == "all":
            spans = [(0, len(text))]
        elif supervised and self._has_spans[has_tools]:
            earlier = messages[: supervised[0]] if asked["loss_on"] != "assistant" else []
            spans = spans_of(marked)[render(earlier, False).count(OPEN) if earlier else 0 :]
        elif supervised:
            finder = TurnFinder(messages, text, lambda *given: without_spans(render(*given)), self._names)
            spans = [finder.span(number) for number in supervised]
        pieces = [each.replace(MARK, "") for each in self._names.split(text)]
        return {"pieces": pieces, "spans": [[at - text.count(MARK, 0, at) for at in span] for span in spans]}

    def _render(self, conversation: dict[str, Any], has_tools: bool, messages: list[dict], prompt: bool) -> str:
        limit_time(self._seconds)
        given = {"tools": None, "documents": None, **conversation, "add_generation_prompt": prompt}
        parts, size = [], 0
        for part in self._templates[has_tools].generate(messages=messages, **self._variables, **given):
            parts.append(part)
            size += len(part)
            if size > self._characters:
                raise Refused(f"writes more than {self._characters:,} characters for one conversation")
        return "".join(parts)

    def _marked(self, value: Any) -> Any:
        """Return a conversation whose special tokens are not those of the template."""
        if isinstance(value, str):
            return self._names.sub(lambda found: found[0][0] + MARK + found[0][1:], OWN.sub("\ufffd", value))
        if isinstance(value, list):
            return [self._marked(each) for each in value]
        if isinstance(value, dict):
            return {self._marked(name): self._marked(each) for name, each in value.items()}
        return value

    @staticmethod
    def _plain(message: dict[str, Any]) -> dict[str, Any]:
        """Return a message as transformers gives it to templates: no null, the reasoning by the names of all models."""
        kept = {name: value for name, value in message.items() if value is not None}
        reasoning = next((kept[name] for name in REASONING if name in kept), None)
        return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def limit_time(seconds: int) -> None:
    """Let the system end this process after more seconds of processor time."""
    used, hard = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(used.ru_utime + used.ru_stime) + seconds + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))


def chosen(messages: list[dict[str, Any]], loss_on: str) -> list[int]:
    """Return the indices of the assistant's messages that the loss is on."""
    roles = [each.get("role") for each in messages]
    first = 0 if loss_on != "completion" or "user" not in roles else len(roles) - roles[::-1].index("user")
    turns = [number for number in range(first, len(roles)) if roles[number] == "assistant"]
    return turns[-1:] if loss_on == "last" else turns


def without_spans(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


def spans_of(text: str) -> Spans:
    """Return the spans between `OPEN` and `CLOSE`, as indices of the text without these."""
    spans, at = [], 0
    for number, part in enumerate(re.split(f"[{OPEN}{CLOSE}]", text)):
        if number % 2:
            spans.append((at, at + len(part)))
        at += len(part)
    return spans


class TurnFinder:
    """Finds the assistant's turns in the text of a template that does not tell them itself.

    A turn is what the conversation up to it has more than the prompt for it. If the whole text does not begin with
    these (a template may drop earlier reasoning, or move the system's text), characters that no text has, at the begin
    and the end of the turn's content, show its place in both.
    """

    def __init__(self, messages: list[dict], text: str, render: Callable[[list[dict], bool], str], names: re.Pattern):
        self._messages, self._text, self._render, self._names = messages, text, render, names

    def span(self, number: int) -> tuple[int, int]:
        """Return the turn of a message, the token that ends it included; raise `Refused` if it is not certain."""
        before, after = self._render(self._messages[:number], True), self._render(self._messages[: number + 1], False)
        start = len(before) if self._text.startswith(before) and after.startswith(before) else None
        if start is not None and self._text.startswith(after) and (end := self._end_of_one(after, start)):
            return start, end
        in_text, in_after = self._probed(len(self._messages), number), self._probed(number + 1, number)
        end = self._end(after, in_after, in_text)
        if start is None:
            begin = min(common(before, after), common(after, in_after))
            if begin < len(before):  # the turn may by chance begin as the prompt ends
                begin = max((each.end() for each in self._names.finditer(after, 0, begin)), default=begin)
            start = self._start(number, after, begin, (common(after, in_after), common(self._text, in_text), end))
            tokens = [len(self._names.findall(each)) for each in (self._text[start:end], after[begin:])]
            if tokens[0] > tokens[1]:  # it has other turns too
                raise self._refused(number)
        if end <= start:
            raise self._refused(number)
        return start, end

    def _probed(self, count: int, number: int) -> str:
        """Return the text of the first messages, with a character before and one after the content of one.

        Names of tools that it calls have them too, because templates may leave out the content beside a call.
        """
        message = self._messages[number]
        probed = {**with_probed_calls(message), "content": around(message.get("content", ""))}
        return self._render([*self._messages[:number], probed, *self._messages[number + 1 : count]], False)

    def _start(self, number: int, after: str, begin: int, places: tuple[int, int, int]) -> int:
        """Return the begin of a turn in the text, by what is before it where the turn is the last one.

        - `after`: the conversation up to the turn, which begins there at `begin`
        - `places`: the begin of the turn's content in `after` and in the text, and the end of the turn in the text
        """
        in_after, content, end = places
        header, lead = after[len(self._render(self._messages[:number], False)) : begin], after[begin:in_after]
        if self._names.search(header) and header not in after[begin:] and header in self._text[:end]:
            return self._text.rindex(header, 0, end) + len(header)
        if header + lead and self._text.endswith(header + lead, 0, content):
            return content - len(lead)
        raise self._refused(number)

    def _end(self, after: str, in_after: str, in_text: str) -> int:
        """Return the end of a turn: what follows its content where it is the last one follows it in the text too."""
        rest = self._text[len(self._text) - common(self._text[::-1], in_text[::-1]) :]
        tail = after[len(after) - common(after[::-1], in_after[::-1]) :]
        first = len(self._text) - len(rest)
        if tail.strip() and rest.startswith(tail.rstrip()) and not self._ends_twice(tail):
            return first + len(tail.rstrip())
        if token := self._names.match(rest):  # another one ends earlier turns, or more than one ends the last
            return first + token.end()
        return first + len(tail) if rest.startswith(tail) else 0

    def _ends_twice(self, tail: str) -> bool:
        """Return whether a text is two or more special tokens, with spaces."""
        return len(self._names.findall(tail)) > 1 and not self._names.sub("", tail).strip()

    def _end_of_one(self, after: str, start: int) -> int:
        """Return the index after the special token that ends a turn, spaces after it apart; 0 if not just one does."""
        *_, before, _, behind = ["", "", *self._names.split(after[start:])]  # text, token, text, token, text
        is_first = len(self._names.findall(after, start)) == 1
        return len(after) - len(behind) if not behind.strip() and (is_first or before.strip()) else 0

    def _refused(self, number: int) -> Refused:
        return Refused(
            f"has no {{% generation %}}, and the text up to message {number + 1}, of the assistant, is no beginning of "
            "the whole conversation's: which tokens the assistant wrote is not certain. Put {% generation %} and "
            "{% endgeneration %} around them in a copy of the template, and name it in data.chat_template"
        )


def around(text: str) -> str:
    return f"{FIRST}{text}{LAST}"


def with_probed_calls(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [with_probed_name(each) for each in message["tool_calls"]]}


def with_probed_name(call: dict[str, Any]) -> dict[str, Any]:
    inner = call.get("function", call)
    named = {**inner, "name": around(inner.get("name", ""))}
    return {**call, "function": named} if "function" in call else named


def common(first: str, second: str) -> int:
    """Return the number of characters that two texts begin with in common."""
    least = min(len(first), len(second))
    return next((at for at in range(least) if first[at] != second[at]), least)


def main() -> None:
    """Answer the lines of standard input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    templates = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if templates is None:
                size, hard = asked.pop("bytes"), resource.getrlimit(resource.RLIMIT_AS)[1]
                resource.setrlimit(resource.RLIMIT_AS, (size if hard < 0 else min(size, hard), hard))
                templates, found = Templates(**asked), {}
            else:
                found = templates.answer(asked)
        except (Refused, SecurityError, MemoryError, RecursionError, jinja2.TemplateSyntaxError) as error:
            found = {"refused": str(error) or f"failed with {type(error).__name__}"}
        except Exception as error:  # the template's own code may raise any
            kind = "" if type(error) is jinja2.TemplateError else f"{type(error).__name__}: "
            found = {"bad": kind + str(error)}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
