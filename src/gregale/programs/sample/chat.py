"""Provides conversations with a model: prompts by the run's chat template, and the exchange in a terminal."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import date
from typing import Any

from gregale.data.chat.conversation import ALL, Conversation
from gregale.data.chat.renderer import ChatEncoder, NotRendered
from gregale.data.sources.chat import ChatRows
from gregale.data.tokenizers import Tokenizer
from gregale.errors import UserError
from gregale.inference.generate import Prompt
from gregale.programs.sample.text_format import COUNT, INTERRUPTED, Continuation, TextFormat, text_format_of
from gregale.runs.run_directory import RunDirectory
from gregale.streams import say_beside

Answerer = Callable[[str], tuple[Continuation, Iterator[str]]]
FIRST_ROOM = 256  # tokens; prompts of a conversation are padded to powers of two, so that few lengths are compiled


class ChatPrompts:
    """Makes prompts of conversations.

    - `form`: its `ends` end an answer
    - `rows`: how a conversation is read
    """

    def __init__(self, encoder: ChatEncoder, form: TextFormat, rows: ChatRows):
        self.form, self._encoder, self._rows = form, encoder, rows

    def ids(self, given: Mapping[str, Any], source: str) -> list[int]:
        """Return the tokens up to the begin of the assistant's next message.

        - `given`: `messages`, and `tools` and `documents` if there are any
        - `source`: of the conversation, for errors

        Raises `UserError` for what is no conversation, `NotRendered` for one that the template rejects.
        """
        conversation = self._rows.conversation(given, source)
        assert isinstance(conversation, Conversation)
        if json.loads(conversation.text)["messages"][-1]["role"] == "assistant":
            raise UserError(f"{source}: the last message is the assistant's; take it out to sample another one.")
        return self._encoder.prompt(conversation).tolist()


@contextmanager
def chat_prompts(run: RunDirectory, tokenizer: Tokenizer) -> Iterator[ChatPrompts]:
    """Yield the prompts by a run's chat template; an answer ends as the template and the run's texts do.

    A template's date is that of the run's sources. Raises `UserError` for a run without a template, and for a
    conversation that the template rejects.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{run.path} has no chat template, because it was not trained on conversations. `gregale sample RUN PROMPT`"
            " continues a text; a run with a source of type chat, or with data.chat_template, has a template."
        )
    sources = (each for each in run.config_at().data.sources.values() if isinstance(each, ChatRows))
    day = next((each.date for each in sources), date.today().isoformat())
    with ChatEncoder(tokenizer) as encoder:
        try:
            form, end = text_format_of(run, tokenizer), encoder.end_of_turn()
            others = form.others if end in form.ends else (*form.others, end)
            yield ChatPrompts(encoder, TextFormat(tokenizer, others=others), ChatRows(loss_on=ALL, date=day))
        except NotRendered as error:
            raise UserError(str(error)) from None


class Dialogue:
    """The messages of a conversation; the oldest ones leave it when it outgrows the context.

    - `limit`: the longest prompt in tokens
    """

    def __init__(self, prompts: ChatPrompts, system: str, limit: int):
        self._prompts, self._limit = prompts, limit
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []  # without the system's; the user's and the assistant's take turns

    def ask(self, text: str, seed: int) -> Prompt:
        """Add the user's message; return the prompt for the answer.

        Raises `UserError`, and keeps the conversation, if the message alone exceeds the limit.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        size = 0
        for first in range(0, len(asked), 2):
            tokens = self._prompts.ids({"messages": [*self._system, *asked[first:]]}, "the conversation")
            if (size := len(tokens)) <= self._limit:
                if first:
                    say_beside(f"The oldest {first} messages leave the conversation, which exceeds the context.")
                self.messages = asked[first:]
                return Prompt(tokens, seed, max(FIRST_ROOM, 1 << (size - 1).bit_length()))
        raise UserError(
            f"The message makes a prompt of {size:,} tokens, and the model's context has room for {self._limit:,} "
            "beside an answer. It is left out; shorten it."
        )


def converse(
    dialogue: Dialogue, lines: Iterable[str], answer_to: Answerer, write: Callable[[str], None], is_terminal: bool
) -> None:
    """Answer the user's lines until they end.

    - `answer_to`: asks a message; returns the text of the answer, and its pieces as they are drawn
    - `is_terminal`: an interrupt ends the answer only, and a message that is refused is left out
    """
    for line in lines:
        try:
            text, pieces = answer_to(line)
        except (UserError, NotRendered) as error:
            if not is_terminal:
                raise
            say_beside(str(error))
            continue
        try:
            for piece in pieces:
                write(piece)
        except KeyboardInterrupt:
            write(text.finish(INTERRUPTED))
            if not is_terminal:
                raise
        finally:
            write("\n")
        dialogue.messages.append({"role": "assistant", "content": text.text})
        if text.ended == COUNT:
            say_beside(f"The answer has {text.tokens:,} tokens, the limit (--tokens).")


def lines_of_user(is_terminal: bool) -> Iterator[str]:
    """Yield the lines of standard input that are not empty, until its end; Ctrl-C discards the line in a terminal."""
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 -- `input` then has the keys of a shell
    while True:
        try:
            line = input("> " if is_terminal and sys.stdout.isatty() else "")
        except EOFError:
            if is_terminal:
                say_beside("")
            return
        except UnicodeDecodeError as error:
            raise UserError(f"standard input: byte {error.start} of a line is not UTF-8.") from None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            say_beside("")  # after ^C
            say_beside("Ctrl-D ends the conversation.")
            continue
        if line.strip():
            yield line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
