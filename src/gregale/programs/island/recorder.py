"""rounds.jsonl: what an island writes down of its rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gregale.errors import UserError
from gregale.services.history import ROUNDS
from gregale.services.lines import History, lines_at
from gregale.storage import Place


class Recorder:
    """A line for each round of this island; those after `last` go: a killed process wrote them.

    A line that cannot be written is kept until it can: neither a full disk nor a store that is away ends a run.

    - `report`: gets a line for the user
    """

    def __init__(self, run: Place, last: int, report: Callable[[str], None]):
        self._report = report
        self._lines = lines_at(run / ROUNDS, History("round", last), report)

    def __call__(self, values: dict[str, Any]) -> None:
        self._lines.add(values)

    def flush(self) -> None:
        """Writes what is held back; raises `StoreError` if a store does not take it."""
        self._lines.flush()

    def close(self) -> None:
        """Writes what is left; that it cannot be written is worth a line, no more."""
        try:
            self._lines.close()
        except UserError as error:
            self._report(str(error))
