"""Provides the texts of conversations, from a process that evaluates the template and may die of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from gregale.data.chat.conversation import Conversation
from gregale.data.chat.template import ChatTemplate
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
