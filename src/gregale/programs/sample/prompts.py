"""Provides the prompts of a file, and their batches."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from gregale.data.sources.base import expand, read_bytes
from gregale.errors import UserError
from gregale.inference.generate import width_of
from gregale.settings import LARGEST_WHOLE, did_you_mean, shortened

JSON_LINES = (".jsonl", ".ndjson")
KEYS = ("prompt", "seed", "id")
MESSAGES_KEYS = ("messages", "tools", "documents", "seed", "id")


@dataclass(frozen=True)
class PromptRequest:
    """A text of the user to continue, or a conversation to answer."""

    given: dict[str, Any]  # `prompt`, or `messages` and what its template gets besides; the result repeats them
    seed: int
    source: str  # file and line of the prompt, for messages
    named: dict[str, Any]  # further keys that the result repeats: `id`, if the prompt has one

    @property
    def prompt(self) -> str:
        return self.given["prompt"]


def read_prompts(path: str, seed: int) -> list[PromptRequest]:
    """Return the prompts of a file, one per line: JSON (`.jsonl`), or text.

    `seed`: seed of prompts without one Raises `UserError` for a missing or empty file, and for a line that is no
    prompt.
    """
    path = expand(path, "prompts")
    if path.endswith(".json"):
        raise UserError(f"prompts: {path} is read line by line: JSON lines are .jsonl, and all other names are text.")
    read = _of_json if path.endswith(JSON_LINES) else _of_text
    return [read(line, source, seed) for line, source in _lines(path, "a prompt")]


def read_messages(path: str, seed: int) -> list[PromptRequest]:
    """Return the conversations of a file, a JSON object a line, see `read_prompts`."""
    lines = _lines(expand(path, "messages"), "a conversation")
    example = '{"messages": [{"role": "user", "content": "..."}]}'
    return [_request(*each, seed, MESSAGES_KEYS, example) for each in lines]


def _lines(path: str, what: str) -> list[tuple[str, str]]:
    """Return the lines of a file, each with its place for messages."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8.") from None
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
    if not lines:
        raise UserError(f"{path}: the file is empty; it has to have {what} a line.")
    return [(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _of_text(line: str, source: str, seed: int) -> PromptRequest:
    if not line.strip():
        raise UserError(
            f"{source}: the prompt is empty. Take the line out; `gregale sample RUN` without a prompt begins a text."
        )
    return PromptRequest({"prompt": line}, seed, source, {})


def _of_json(line: str, source: str, seed: int) -> PromptRequest:
    found = _request(line, source, seed, KEYS, '{"prompt": "..."}')
    prompt = found.given.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        what = "is missing" if not found.given else "is empty" if prompt == "" else f"is {shortened(str(prompt))}"
        raise UserError(f"{source}: `prompt` {what}; it has to be a text to continue.")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise UserError(f"{source}: `prompt` has half of a surrogate pair, which is no character.")
    return found


def _request(line: str, source: str, seed: int, keys: Sequence[str], example: str) -> PromptRequest:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise UserError(f"{source}: found {type(found).__name__}, expected an object: {example}.")
    for key in found:
        if key not in keys:
            near = did_you_mean(get_close_matches(key, keys))
            raise UserError(f"{source}: `{shortened(key)}` is not a valid key.{near} Valid keys: {', '.join(keys)}.")
    own, named = found.pop("seed", seed), {"id": found.pop("id")} if "id" in found else {}
    if not isinstance(own, int) or isinstance(own, bool) or not 0 <= own <= LARGEST_WHOLE:
        raise UserError(
            f"{source}: `seed` is {shortened(str(own))}; it has to be a whole number from 0 to {LARGEST_WHOLE:,}."
        )
    return PromptRequest(found, own, source, named)


def batches_of(lengths: Sequence[int], rows: int) -> Iterator[list[int]]:
    """Yield the indices of the prompts of each batch: at most `rows`, all padded to the same length.

    The shapes of a prompt's computation thus do not depend on the other prompts. `lengths`: in tokens
    """
    of_width: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        of_width.setdefault(width_of(length), []).append(number)
    batches = [same[start : start + rows] for same in of_width.values() for start in range(0, len(same), rows)]
    yield from sorted(batches)
