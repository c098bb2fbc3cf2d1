"""What a fleet shows: a table of its islands on a terminal, else plain lines, and a line for whoever comes or goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO, cast

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table

from gregale.streams import LastingStream

PLAIN_SECONDS = 5.0
COLUMNS = ("island", "state", "step", "loss", "tokens/s", "round", "members", "waited", "sent")

Status = Mapping[str, object]


class FleetView:
    """Shows the newest status of every island.

    A status is what an island's server tells: `state`, `step`, `steps`, `loss`, `tokens_per_second`, `round`,
    `members`, `waiting_seconds`, `network_bytes_sent`; empty for one that does not answer.
    """

    def __init__(self, file: TextIO | None = None, plain_seconds: float = PLAIN_SECONDS):
        stream = LastingStream(file or sys.stdout)
        self._console = Console(file=cast(TextIO, stream))
        self._live: Live | None = None
        if stream.isatty() and self._console.is_interactive:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._plain_seconds, self._last_plain = plain_seconds, 0.0

    def show(self, statuses: Mapping[str, Status]) -> None:
        """Redraws the table, or writes a line if the last one is some seconds old."""
        if self._live is not None:
            self._live.update(table(statuses), refresh=True)
        elif time.monotonic() - self._last_plain >= self._plain_seconds:
            self._last_plain = time.monotonic()
            self.message("; ".join(in_words(name, status) for name, status in statuses.items()))

    def message(self, text: str) -> None:
        """Shows a line, above the table if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=self._live is None)

    def close(self) -> None:
        """Leaves the last table standing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> FleetView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def table(statuses: Mapping[str, Status]) -> Table:
    """A row for each island."""
    made = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        made.add_column(column, justify="left" if column in ("island", "state", "members") else "right", no_wrap=True)
    for name, status in statuses.items():
        made.add_row(name, *cells(status))
    return made


def cells(status: Status) -> list[str]:
    """The columns behind the name."""
    if not status:
        return ["starting"]
    loss, members = status.get("loss"), status.get("members", [])
    return [
        str(status["state"]),
        f"{status['step']}/{status['steps']}",
        "" if loss is None else f"{loss:.4f}",
        f"{status.get('tokens_per_second') or 0:,.0f}",
        str(status["round"]),
        str(len(cast(list, members))),
        f"{status.get('waiting_seconds') or 0:.1f} s",
        decimal(cast(int, status.get("network_bytes_sent") or 0)),
    ]


def in_words(name: str, status: Status) -> str:
    """An island in a plain line."""
    if not status:
        return f"{name}: starting"
    state, step, loss, speed, number, members, _, _ = cells(status)
    return f"{name}: {state}, step {step}, loss {loss or '-'}, {speed} tokens/s, round {number}, {members} members"


def changes(before: Mapping[str, Status], now: Mapping[str, Status]) -> list[str]:
    """Who joined, left or died, by what the islands themselves say of the fleet."""
    known, present = _fleet(before), _fleet(now)
    if not known or not present:
        return []
    came = [f"{name} is in the fleet" for name in sorted(present - known)]
    return came + [f"{name} is out of the fleet" for name in sorted(known - present)]


def _fleet(statuses: Mapping[str, Status]) -> set[str]:
    """The members of the newest round that any island knows of."""
    newest = max(statuses.values(), key=lambda status: cast(int, status.get("round", -1)), default={})
    return set(cast(list, newest.get("members", [])))
