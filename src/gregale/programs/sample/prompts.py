"""Prompts of a file, and which of them are continued together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from gregale.data.sources.base import expand
from gregale.data.sources.files import read_bytes
from gregale.errors import UserError
from gregale.inference.generate import width_of
from gregale.settings import LARGEST_WHOLE, did_you_mean, shortened

JSON_LINES = (".jsonl", ".ndjson")
KEYS = ("prompt", "seed", "id")


@dataclass(frozen=True)
class PromptRequest:
    """A prompt as it was given.

    - `named`: what stands before the result: its `id`, if it has one
    - `place`: where it was given, for messages
    """

    prompt: str
    seed: int
    place: str
    named: dict[str, Any]


def read_prompts(path: str, seed: int) -> list[PromptRequest]:
    """The prompts of a file, one a line: of JSON (`.jsonl`), or the text itself.

    `seed`: of prompts that have none

    Raises `UserError` for a file that is missing or has none, and for a line that is no prompt.
    """
    path = expand(path, "prompts")
    if path.endswith(".json"):
        raise UserError(f"prompts: {path} is read line by line: JSON lines are .jsonl, and all other names are text.")
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8.") from None
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
    places = (f"{path}, line {number}" for number in range(1, len(lines) + 1))
    read = _of_json if path.endswith(JSON_LINES) else _of_text
    if not lines:
        raise UserError(f"{path}: the file is empty; it has to have a prompt a line.")
    return [read(line, place, seed) for line, place in zip(lines, places, strict=True)]


def _of_text(line: str, place: str, seed: int) -> PromptRequest:
    if not line.strip():
        raise UserError(
            f"{place}: the prompt is empty. Take the line out; `gregale sample RUN` without a prompt begins a text."
        )
    return PromptRequest(line, seed, place, {})


def _of_json(line: str, place: str, seed: int) -> PromptRequest:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise UserError(f'{place}: found {type(found).__name__}, expected an object: {{"prompt": "..."}}.')
    for key in found:
        if key not in KEYS:
            near = did_you_mean(get_close_matches(key, KEYS))
            raise UserError(f"{place}: `{shortened(key)}` is not a valid key.{near} Valid keys: {', '.join(KEYS)}.")
    prompt, own = found.get("prompt"), found.get("seed", seed)
    if not isinstance(prompt, str) or not prompt:
        what = "is missing" if "prompt" not in found else "is empty" if prompt == "" else f"is {shortened(str(prompt))}"
        raise UserError(f"{place}: `prompt` {what}; it has to be a text to continue.")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise UserError(f"{place}: `prompt` has half of a surrogate pair, which is no character.")
    if not isinstance(own, int) or isinstance(own, bool) or not 0 <= own <= LARGEST_WHOLE:
        raise UserError(
            f"{place}: `seed` is {shortened(str(own))}; it has to be a whole number from 0 to {LARGEST_WHOLE:,}."
        )
    return PromptRequest(prompt, own, place, {"id": found["id"]} if "id" in found else {})


def batches_of(lengths: Sequence[int], rows: int) -> Iterator[list[int]]:
    """Which prompts are continued together: `rows` at most, all filled up to the same length.

    So the shapes by which a prompt is computed are its own, whatever else is in the file. `lengths`: in tokens
    """
    of_width: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        of_width.setdefault(width_of(length), []).append(number)
    batches = [same[start : start + rows] for same in of_width.values() for start in range(0, len(same), rows)]
    yield from sorted(batches)
