"""Conversations rendered by a template, in a process of its own, and encoded with a mask of the trained turns."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gregale.data.chat.conversation import ALL, ASSISTANT, Conversation
from gregale.data.chat.template import ChatTemplate
from gregale.data.tokenizers import Tokenizer
from gregale.errors import UserError

PROGRAM = "gregale.data.chat.rendering"  # not imported, because it imports Jinja
ROOT = Path(__file__).parents[3]  # of this package, which the process imports, too


class Limits(NamedTuple):
    """What a template may use for one conversation."""

    seconds: int = 10  # of processor time, for one rendering
    characters: int = 10_000_000
    bytes: int = 4 << 30  # of memory, the interpreter included


class Rendered(NamedTuple):
    """The text of a conversation.

    - `pieces`: of the text; the second, fourth and so on are special tokens that the template wrote
    - `spans`: the characters that the loss is on, (first, end) of each span
    """

    pieces: list[str]
    spans: list[tuple[int, int]]


class NotRendered(Exception):
    """The template rejects one conversation."""


class Renderer:
    """Evaluates a chat template; use it in a `with` statement. The process starts with the first conversation.

    - `names`: the special tokens, which are tokens where the template writes them, and text in a conversation
    """

    def __init__(self, template: ChatTemplate, names: Sequence[str], limits: Limits = Limits()):  # noqa: B008
        self._start = {**asdict(template), "names": list(names), **limits._asdict()}
        self._limits, self._process = limits, None

    def __enter__(self) -> "Renderer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def __call__(self, conversation: Conversation, prompt: bool = False) -> Rendered:
        """Return the text of a conversation; `prompt`: it ends with the begin of the assistant's answer.

        Raises `NotRendered` if the template rejects the conversation; `UserError` if it cannot be used at all.
        """
        if self._process is None:
            self._process = self._started()
            self._ask(json.dumps(self._start), "its first line")
        options = {"loss_on": conversation.loss_on, "date": conversation.date, "prompt": prompt}
        line = f'{{"conversation": {conversation.text}, {json.dumps(options)[1:]}'
        found = self._ask(line, conversation.location)
        return Rendered(found["pieces"], [(first, end) for first, end in found["spans"]])

    def _started(self) -> subprocess.Popen[str]:
        """Return the process, which imports this package and nothing of the working directory."""
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return subprocess.Popen(
            [sys.executable, "-P", "-X", "utf8", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is for the process that waits
        )

    def _ask(self, line: str, location: str) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        found = json.loads(answer) if answer else {"refused": self._end(self._process.wait())}
        if "bad" in found:
            raise NotRendered(f"{location}: the chat template rejects the conversation ({found['bad']}).")
        if "refused" in found:
            raise UserError(f"data.chat_template, at {location}: the template {found['refused'].rstrip('.')}.")
        return found

    def _end(self, code: int) -> str:
        if code == -signal.SIGXCPU:
            return f"takes more than {self._limits.seconds} s of processor time for one conversation"
        return f"ended the process that evaluates it (exit code {code}), which may have {self._limits.bytes:,} bytes"


class Encoded(NamedTuple):
    """A document as tokens.

    - `ids`: int32 [token]
    - `more_bytes`: bytes of text of each token beyond its vocabulary entry, int64 [token]
    - `supervised`: whether the loss is on each token, bool [token]; None: on all
    """

    ids: np.ndarray
    more_bytes: np.ndarray
    supervised: np.ndarray | None = None

    def ended(self, end: int) -> "Encoded":
        """Return the document with the token that ends it, unless it is there; the loss is not on one that is added."""
        if self.supervised is not None and len(self.ids) and self.ids[-1] == end:
            return self
        supervised = None if self.supervised is None else np.append(self.supervised, False)
        return Encoded(np.append(self.ids, end), np.append(self.more_bytes, 0), supervised)


class ChatEncoder:
    """Encodes conversations with the chat template of a tokenizer; use it in a `with` statement."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits = Limits()):  # noqa: B008
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self._renderer = Renderer(template, list(tokenizer.control_tokens), limits) if template else None

    def __enter__(self) -> "ChatEncoder":
        return self

    def __exit__(self, *given: object) -> None:
        if self._renderer is not None:
            self._renderer.__exit__(*given)

    def encode(self, conversation: Conversation) -> Encoded:
        """Return the tokens of a conversation; raise `NotRendered` or `UserError`, see `Renderer`.

        The text is tokenized once, as a whole. The loss is on each token that has a character of a span.
        """
        rendered = self._rendered(conversation, prompt=False)
        ids, more_bytes, offsets = self._tokenizer.encode_pieces(rendered.pieces)
        if conversation.loss_on == ALL:
            return Encoded(ids, more_bytes)
        starts, ends = np.maximum.accumulate(offsets, axis=0).T
        supervised = np.zeros(len(ids), bool)
        for first, end in rendered.spans:
            supervised[np.searchsorted(ends, first, side="right") : np.searchsorted(starts, end)] = True
        return Encoded(ids, more_bytes, supervised)

    def prompt(self, conversation: Conversation) -> np.ndarray:
        """Return the ids of a conversation that the assistant continues, int32 [token]."""
        return self._tokenizer.encode_pieces(self._rendered(conversation, prompt=True).pieces)[0]

    def end_of_turn(self) -> int:
        """Return the id that ends the assistant's turns by the template; the end of a document if it is not certain."""
        messages = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
        try:
            found = self.encode(Conversation(messages, "", "a conversation of two words", ASSISTANT, "2025-01-01"))
        except (NotRendered, UserError):
            return self._tokenizer.end_of_document
        assert found.supervised is not None
        last = found.ids[found.supervised][-1:].tolist()
        ends = {self._tokenizer.end_of_document, *self._tokenizer.control_tokens.values()}
        return last[0] if last and last[0] in ends else self._tokenizer.end_of_document

    def _rendered(self, conversation: Conversation, prompt: bool) -> Rendered:
        if self._renderer is None:
            raise UserError("data.chat_template: this run's tokenizer has no chat template; name a file of Jinja.")
        return self._renderer(conversation, prompt)
