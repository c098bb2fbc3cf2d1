"""Provides the process that evaluates chat templates, which are programs of others.

`gregale.data.chat.renderer` starts this module and ends the process. It reads JSON, a line each: first the templates
and limits, then conversations. It answers each line with a line. It imports Jinja, Python's own modules and a few of
this folder, so it starts fast.

Limits of processor time and memory are the system's. So a template that never ends, in whatever expression, ends the
process and nothing else.
"""

import json
import re
import resource
import sys
from collections.abc import Callable
from datetime import datetime
from functools import cached_property, partial
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from gregale.data.chat.messages import (
    CLOSE,
    MARK,
    OPEN,
    OWN,
    PLACES,
    AssistantTurns,
    Marked,
    Messages,
    NotCertain,
    Part,
    Spans,
    chosen,
    common,
    in_parts,
    is_text,
    plain,
    read_marks,
    symbols_of,
    tojson,
    with_marks,
)

ROLES = (  # that a template may have without naming them, if it writes roles as they are
    *("user", "assistant", "system", "developer", "tool", "function", "observation", "ipython", "environment"),
    *("context", "function_response", "tool_response", "tool_call", "available_tools", "control"),
)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Refused(Exception):
    """The template cannot be used, whatever the conversation."""


FATAL = (Refused, SecurityError, MemoryError, RecursionError)


class Generation(Extension):
    """The block `{% generation %}`: its output is between `OPEN` and `CLOSE` in an environment that `marks_spans`."""

    tags = {"generation"}  # noqa: RUF012 -- a class variable of Jinja's

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

    def _between(self, caller: Callable[[], str]) -> str:
        assert isinstance(self.environment, Environment)
        return f"{OPEN}{caller()}{CLOSE}" if self.environment.marks_spans else caller()


class Loops(NodeTransformer):
    """Puts calls into the loops of a template that say which message an iteration is about, see `Environment`."""

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        self.generic_visit(node)
        inside = {name.name for name in node.find_all(nodes.Name) if name.ctx == "store"}
        targets = [name.name for name in nodes.Tuple([node.target], "store").find_all(nodes.Name)]
        calls = [said("begin_iteration", node, each) for each in targets]
        for item in node.find_all(nodes.Getitem):
            match item.arg, item.node:
                case nodes.Name(name=at), nodes.Name(name=of) if at in targets and of not in inside:
                    calls.append(said("begin_iteration", node, at, of))  # `messages[i]`, in a loop over numbers
        node.body = [*calls, *node.body]
        return [said("begin_loop", node), node, said("end_loop", node)]


def said(method: str, at: nodes.Node, *names: str) -> nodes.Node:
    """Return a statement that calls a method of the environment with variables."""
    given: list[nodes.Expr] = [nodes.Name(name, "load") for name in names]
    call = nodes.Call(nodes.EnvironmentAttribute(method), given, [], None, None)
    return nodes.ExprStmt(call).set_lineno(at.lineno, override=True)


class Environment(ImmutableSandboxedEnvironment):
    """The environment in which transformers evaluates chat templates, which also knows whose iteration runs.

    - `date`: what `strftime_now` formats
    - `owners`: for each loop that runs, the index of its iteration's message, or else that of the loop around it
    """

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self.date, self.marks_spans, self.owners, self.messages = "", False, [None], {}
        self.filters["tojson"] = tojson
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda form: datetime.fromisoformat(self.date).strftime(form)

    def traced(self, text: str) -> tuple[jinja2.Template, set[str]]:
        """Return a template, and the texts that it quotes, among which are the roles that it compares with."""
        tree = self.parse(text)
        quoted = {each.value for each in tree.find_all(nodes.Const) if isinstance(each.value, str)}
        code = self.compile(Loops().visit(tree).set_environment(self))
        return self.template_class.from_code(self, code, self.globals), quoted

    def begin_loop(self) -> None:
        self.owners.append(self.owners[-1])

    def begin_iteration(self, item: Any, items: Any = None) -> None:
        if isinstance(items, list) and type(item) is int and 0 <= item < len(items):
            item = items[item]
        self.owners[-1] = self.messages.get(id(item), self.owners[-1])

    def end_loop(self) -> None:
        self.owners.pop()


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


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
        self._variables, self._seconds, self._characters = variables, seconds, characters
        limit_time(seconds)  # constants are computed when a template is compiled
        self._environment = Environment()
        self._templates = [self._environment.traced(each) for each in (text, tool_use or text)]
        self._has_spans = [bool(GENERATION.search(each)) for each in (text, tool_use or text)]
        self._names = re.compile(f"({'|'.join(sorted(map(re.escape, names), key=len, reverse=True)) or '(?!)'})")
        self._takes_parts: list[bool | None] = [None, None]

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the text of a conversation and the spans that the loss is on, as indices of characters.

        The text is in pieces: the second, fourth and so on are special tokens. Inside of `answer`, each name of a
        special token in the conversation has `MARK` after its first character, so that it is none of these.
        """
        given = {"tools": None, "documents": None, **self._marked(asked["conversation"])}
        has_tools = "tools" in asked["conversation"]
        template, quoted = self._templates[has_tools]
        messages = [{**plain(each), "role": role_of(each, quoted)} for each in given.pop("messages")]
        self._environment.date = asked["date"]
        render = partial(self._render, template, given)
        if self._takes_parts[has_tools] is None:
            self._takes_parts[has_tools] = takes_parts(render)
        if self._takes_parts[has_tools]:
            messages = [in_parts(each) for each in messages]
        rendering = Rendering(render, messages, asked["prompt"], self._names, self._variables.get("eos_token", ""))
        rendering.check_calls()
        text, spans = rendering.text, []
        if not asked["prompt"]:
            spans = rendering.spans(asked["loss_on"], self._has_spans[has_tools])
        pieces = [each.replace(MARK, "") for each in self._names.split(text)]
        return {"pieces": pieces, "spans": [[at - text.count(MARK, 0, at) for at in span] for span in spans]}

    def _render(
        self,
        template: jinja2.Template,
        given: dict[str, Any],
        messages: Messages,
        prompt: bool = False,
        marks_spans: bool = False,
    ) -> list[Part]:
        """Return what the template writes.

        - `prompt`: it ends with the begin of the assistant's answer
        - `marks_spans`: the output of `{% generation %}` is between `OPEN` and `CLOSE`
        """
        limit_time(self._seconds)
        state = self._environment
        state.marks_spans, state.owners = marks_spans, [None]
        state.messages = {id(each): number for number, each in enumerate(messages)}
        parts, left = [], self._characters * (4 if marks_spans else 1)  # marks of messages are characters, too
        for text in template.generate(messages=messages, **self._variables, **given, add_generation_prompt=prompt):
            owners = [each for each in state.owners if each is not None]
            parts.append(Part(text, state.owners[-1], owners[0] if owners else None))
            left -= len(text)
            if left < 0:
                raise Refused(f"writes more than {self._characters:,} characters for one conversation")
        return parts

    def _marked(self, value: Any) -> Any:
        """Return a conversation whose special tokens are not those of the template."""
        if isinstance(value, str):
            return self._names.sub(lambda found: found[0][0] + MARK + found[0][1:], OWN.sub("\ufffd", value))
        if isinstance(value, list):
            return [self._marked(each) for each in value]
        if isinstance(value, dict):
            return {self._marked(name): self._marked(each) for name, each in value.items()}
        return value


class Rendering:
    """The text of a conversation by a template, and the spans of its messages.

    - `render(messages, prompt, marks_spans)`: what the template writes
    - `names`: a regular expression of the special tokens
    - `stop`: the one that ends generation by the tokenizer's configuration
    """

    def __init__(
        self, render: Callable[..., list[Part]], messages: Messages, prompt: bool, names: re.Pattern[str], stop: str
    ):
        self._render, self._messages, self._names, self._stop = render, messages, names, stop
        self._parts, self._prompts = render(messages, prompt), {}
        self.text, self._ends_in_prompt = joined(self._parts), prompt

    @cached_property
    def _marked(self) -> Marked | None:
        """Return what marks in the messages say; None if the template cannot render these."""
        untold, found = all(each.owner is None for each in self._parts), None
        for places in PLACES:
            marked = [with_marks(each, number, untold, places) for number, each in enumerate(self._messages)]
            parts = tried(self._render, marked, self._ends_in_prompt, True)
            found = found if parts is None else read_marks(joined(parts))
            if found and found.text == self.text:
                break
        return found

    def check_calls(self) -> None:
        called = {number for number, each in enumerate(self._messages) if each.get("tool_calls")}
        if called and self._marked and not called <= self._marked.calls:
            raise_exception("it leaves out the calls of tools")

    def spans(self, loss_on: str, has_spans: bool) -> Spans:
        """Return the spans that the loss is on; `has_spans`: the template has `{% generation %}`."""
        if loss_on == "all":
            return [(0, len(self.text))]
        if not (supervised := chosen(self._messages, loss_on)):
            return []
        marked = self._marked if self._marked and self._marked.text == self.text else None
        if has_spans:
            return self._told(marked or read_marks(joined(self._render(self._messages, False, True))), supervised)
        try:
            if marked is None:
                raise NotCertain
            turns = AssistantTurns(self._parts, marked.contents, self._prompt, self._names, self._stop)
            for number in supervised:
                if is_text(self._messages[number].get("content")) and number not in turns.own:
                    raise_exception(f"it leaves out the text of message {number + 1}")
            return [span for number in supervised for span in turns.spans(number)]
        except NotCertain:
            raise Refused(
                "has no {% generation %}, and which tokens the assistant wrote is not certain. Put {% generation %} "
                "and {% endgeneration %} around them in a copy of the template, and name it in data.chat_template"
            ) from None

    def _told(self, marked: Marked, supervised: list[int]) -> Spans:
        """Return the spans of `{% generation %}` in some messages."""
        if marked.text != self.text:
            raise Refused("writes another text where {% generation %} is")
        found, owner = [], None
        turns = chosen(self._messages, "assistant")
        owners = [each.owner for each in self._parts for _ in each.text]
        for start, end in marked.spans:
            inside = {each.message for each in marked.contents if start <= each.at < end}
            if not inside.issubset(turns):
                raise Refused("has the text of another message in {% generation %}")
            # Another message's iteration may write the end of a turn.
            owner = min(inside, default=next((each for each in owners[start:end] if each in turns), owner))
            if owner is None and supervised != turns:
                raise Refused("does not tell which message wrote the text in {% generation %}")
            if owner in supervised or owner is None:
                found.append((start, end))
        return found

    def _prompt(self, number: int) -> str:
        """Return the text between the messages before one of the assistant's and what the model writes."""
        role = self._messages[number - 1]["role"] if number else ""
        more = [*self._messages, {"role": "user", "content": "a"}]
        if role not in self._prompts:
            found = (self._prompt_after(each) for each in (self._messages[:number], self._messages, more) if each)
            self._prompts[role] = next((each for each in found if each.strip()), "")
        return self._prompts[role]

    def _prompt_after(self, messages: Messages) -> str:
        found = tried(self._render, messages, True) or []
        last = max((number for number, each in enumerate(found) if each.owner is not None), default=len(found))
        if (text := joined(found[last + 1 :])).strip():
            return text
        text, without = joined(found), joined(tried(self._render, messages) or [])
        return text[common(symbols_of(text, self._names), symbols_of(without, self._names)) :]


def tried(render: Callable[..., list[Part]], *given: Any) -> list[Part] | None:
    """Return what a template writes; None if it rejects what it is given."""
    try:
        return render(*given)
    except FATAL:
        raise
    except Exception:  # the template's own code may raise any
        return None


def joined(parts: list[Part]) -> str:
    return "".join(part.text for part in parts)


def role_of(message: dict[str, Any], quoted: set[str]) -> str:
    """Return the role of a message; reject one that no template has; `quoted`: the texts that this template quotes."""
    role = message["role"]
    for each in (role, role.strip().lower()):
        if each in ROLES or each in quoted:
            return each
    raise_exception(f"the role {role!r} is none of {', '.join(ROLES)}, and the template does not name it")


def takes_parts(render: Callable[..., list[Part]]) -> bool:
    """Return whether a template writes contents that are lists of parts, and leaves out texts."""
    talk = [{"role": role, "content": word} for role, word in (("user", "question"), ("assistant", "answer"))]
    found = [tried(render, messages) for messages in (talk, [in_parts(each) for each in talk])]
    return ["answer" in joined(each or []) for each in found] == [False, True]


def limit_time(seconds: int) -> None:
    """Let the system end this process after more seconds of processor time."""
    used, hard = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(used.ru_utime + used.ru_stime) + seconds + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))


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
        except (*FATAL, jinja2.TemplateSyntaxError) as error:
            found = {"refused": str(error) or f"failed with {type(error).__name__}"}
        except Exception as error:  # the template's own code may raise any
            kind = "" if type(error) is jinja2.TemplateError else f"{type(error).__name__}: "
            found = {"bad": kind + str(error)}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
