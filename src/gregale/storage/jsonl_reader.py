"""A reader of JSONL files that skips damaged lines. This module does not import JAX.

All readers of `metrics.jsonl`, `rounds.jsonl`, `starts.jsonl` and `changes.jsonl` validate lines with `entry_of`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gregale.storage import StoragePath

Entry = Mapping[str, Any]
HIGHEST_STEP = 2**53


class Entries(NamedTuple):
    """The valid entries of a file, in its order, and a sentence about its damaged lines."""

    entries: tuple[Entry, ...]
    problem: str | None


def entry_of(line: bytes, number: str | None = None) -> dict[str, Any] | None:
    """Return the object on a line; None if the line is not valid.

    - `number`: a key whose value must be an integer of at least 0
    """
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):  # bytes that are not UTF-8 also raise a ValueError
        return None
    if not isinstance(entry, dict):
        return None
    if number is None:
        return entry
    value = entry.get(number)
    return entry if type(value) is int and 0 <= value < HIGHEST_STEP else None


def read_entries(path: StoragePath, number: str | None = None) -> Entries:
    """Read the entries of a file or an object; return no entries if it does not exist.

    A last line without a line break is ignored: it is being written, or the writing process was killed.

    - `number`: as in `entry_of`
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return Entries((), None)
    found = [entry_of(line, number) for line in lines]
    return Entries(tuple(entry for entry in found if entry is not None), problem_of(path, found))


def problem_of(path: StoragePath, found: Sequence[Entry | None]) -> str | None:
    """Return a sentence about the damaged lines; None if all lines are valid.

    - `found`: the entry of each complete line, or None
    """
    damaged = [number for number, entry in enumerate(found, 1) if entry is None]
    return damage(path, len(damaged), len(found), damaged[0]) if damaged else None


def damage(path: StoragePath, damaged: int, lines: int, first: int) -> str:
    """Return the sentence about damaged lines; `first` is the number of the first of them."""
    return f"{path}: {damaged:,} of {lines:,} lines are damaged, the first is line {first:,}; they are left out."
