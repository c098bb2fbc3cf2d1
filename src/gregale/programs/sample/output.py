"""Provides the output of `gregale sample`: text during sampling, results as JSON lines, and the throughput."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from gregale.data.sources.base import expand
from gregale.errors import UserError
from gregale.storage import is_url

# Control characters that a terminal would execute, with their visible symbols; tabs and line ends stay.
PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
COMPILED_BLOCKS = 2  # each runs a program for the first time
PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Screen:
    """Unbuffered standard output, which shows control characters as symbols on a terminal."""

    def __init__(self, stream: TextIO):
        self._stream, self._shown = stream, PICTURES if stream.isatty() else {}

    def write(self, text: str) -> None:
        self._stream.write(text.translate(self._shown) if self._shown else text)
        self._stream.flush()


class Results:
    """Writer of results as JSON lines in the order of the prompts; a result waits for all earlier ones."""

    def __init__(self, stream: TextIO):
        self._stream, self._next = stream, 0
        self._waiting: dict[int, dict[str, Any]] = {}
        self._ascii = (stream.encoding or "").lower().replace("-", "") != "utf8"  # UTF-8 encodes every character

    def add(self, number: int, result: dict[str, Any]) -> None:
        """Add the result of a prompt, and write all results whose predecessors are complete."""
        self._waiting[number] = result
        while self._next in self._waiting:
            self._write(self._waiting.pop(self._next))
            self._next += 1
        self._stream.flush()

    def finish(self) -> None:
        """Write the held results, whose predecessors will not complete."""
        for number in sorted(self._waiting):
            self._write(self._waiting.pop(number))
        self._stream.flush()

    def _write(self, result: dict[str, Any]) -> None:
        self._stream.write(json.dumps(result, ensure_ascii=self._ascii) + "\n")


@contextmanager
def results_to(out: str | None) -> Iterator[Results]:
    """Yield a writer of results to a file or to standard output; an interrupt keeps the complete results.

    Before the end the file has a temporary name (`.partial-` and a number at its end). It keeps that name if the
    command fails or the process is killed. Raises `UserError` if the file exists, or cannot be made.
    """
    if out is None:
        results = Results(sys.stdout)
        try:
            yield results
        finally:
            results.finish()
        return
    if is_url(out):
        raise UserError(f"out: {out} is a URL; results go to a file of this machine, or to standard output.")
    path = Path(expand(out, "out"))
    if path.exists():
        raise UserError(f"out: {path} exists already, and would be overwritten. Give another name, or remove it.")
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        file = open(partial, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"out: {path} cannot be written: {error.strerror}.") from None
    is_valid = False
    try:
        with file:
            results = Results(file)
            try:
                yield results
            finally:
                results.finish()
        is_valid = True
    except KeyboardInterrupt:
        is_valid = True
        raise
    finally:
        if not partial.stat().st_size:
            partial.unlink()
        elif is_valid and path.exists():
            raise UserError(f"out: {path} was made by another meanwhile; the results are in {partial}.")
        elif is_valid:
            os.replace(partial, path)


class ThroughputMeter:
    """Measures throughput: the time until the first tokens, which includes compilation, and the rate after them.

    - `tokens`: the number of tokens so far.
    """

    def __init__(self):
        self._began, self._first_s, self._first_tokens = perf_counter(), 0.0, 0
        self._blocks, self.tokens, self._s = 0, 0, 0.0

    def at(self, tokens: int) -> None:
        """Record a new block; `tokens` is the total number so far."""
        self.tokens, self._s, self._blocks = tokens, perf_counter() - self._began, self._blocks + 1
        if self._blocks <= COMPILED_BLOCKS:
            self._first_s, self._first_tokens = self._s, tokens

    def __str__(self) -> str:
        """Return `120 tokens: the first after 2.13 s, then 312 tokens/s`."""
        later, later_s = self.tokens - self._first_tokens, self._s - self._first_s
        rate = f", then {later / later_s:,.4g} tokens/s" if later > 0 and later_s > 0 else ""
        return f"{self.tokens:,} token{'s' * (self.tokens != 1)}: the first after {self._first_s:.2f} s{rate}"
