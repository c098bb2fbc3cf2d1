"""Entries: the JSON objects in a file of lines, whatever else stands in the file. It imports no JAX.

    found = read_entries(run.metrics, number="step")
    found.entries                             # the sound ones
    found.problem                             # the lines that were skipped, in a sentence; None: all are sound

All that reads `metrics.jsonl`, `rounds.jsonl`, `starts.jsonl` and `changes.jsonl` takes a line for sound by `entry_of`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gregale.storage import StoragePath

Entry = Mapping[str, Any]
HIGHEST_STEP = 2**53


class Entries(NamedTuple):
    """The sound entries of a file, in its order, and a sentence about the lines that are damaged."""

    entries: tuple[Entry, ...]
    problem: str | None


def entry_of(line: bytes, number: str | None = None) -> dict[str, Any] | None:
    """Return the object on a line; None if there is none.

    - `number`: a key that has to hold a whole number of at least 0
    """
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):  # bytes that are no UTF-8 are a ValueError too
        return None
    if not isinstance(entry, dict):
        return None
    if number is None:
        return entry
    value = entry.get(number)
    return entry if type(value) is int and 0 <= value < HIGHEST_STEP else None


def read_entries(place: StoragePath, number: str | None = None) -> Entries:
    """Read the entries of a file or an object; none if it does not exist.

    A last line without its end is being written, or its process was killed: it is left out without a word.

    - `number`: as in `entry_of`
    """
    try:
        lines = place.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return Entries((), None)
    found = [entry_of(line, number) for line in lines]
    return Entries(tuple(entry for entry in found if entry is not None), problem_of(place, found))


def problem_of(place: StoragePath, found: Sequence[Entry | None]) -> str | None:
    """Return a sentence about the lines that are damaged; None if all are sound.

    - `found`: for each whole line its entry, or None
    """
    damaged = [number for number, entry in enumerate(found, 1) if entry is None]
    return damage(place, len(damaged), len(found), damaged[0]) if damaged else None


def damage(place: StoragePath, damaged: int, lines: int, first: int) -> str:
    """Return the sentence about damaged lines; `first` is the number of the first of them."""
    return f"{place}: {damaged:,} of {lines:,} lines are damaged, the first is line {first:,}; they are left out."
