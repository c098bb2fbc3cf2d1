"""rounds.jsonl: what an island writes down of its rounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gregale.files import reason


class Recorder:
    """A line for each round of this island; those after `last` go: a killed process wrote them.

    A line that cannot be written is kept until it can: no full disk ends a run.

    - `report`: gets a line for the user
    """

    def __init__(self, path: Path, last: int, report: Callable[[str], None]):
        self._path, self._report = path, report
        self._waiting: list[str] = []
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _round_of(line) <= last]
            path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def __call__(self, values: dict[str, Any]) -> None:
        waited = bool(self._waiting)
        self._waiting.append(json.dumps(values) + "\n")
        content = "".join(self._waiting).encode()
        size = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("ab") as file:
                file.write(content)
        except OSError as error:
            with self._path.open("ab") as file:
                file.truncate(size)  # all of the lines, or none
            if not waited:
                self._report(
                    f"{self._path} cannot be written: {reason(error)}. Its lines are kept until there is room."
                )
        else:
            self._waiting.clear()


def _round_of(line: str) -> float:
    try:
        return json.loads(line)["round"]
    except (ValueError, KeyError):
        return float("inf")
