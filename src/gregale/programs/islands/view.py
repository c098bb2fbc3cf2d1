"""What a fleet shows: a table of its islands on a terminal, else plain lines, and a line for whoever comes or goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO, cast

from rich.filesize import decimal
from rich.live import Live
from rich.table import Table

from gregale.streams import LastingStream, printable
from gregale.terminal import Console

PLAIN_SECONDS = 5.0
COLUMNS = ("island", "state", "step", "loss", "tokens/s", "round", "members", "waited", "sent")
FIRST_TO_GO = ("sent", "waited", "members", "state", "tokens/s", "loss")  # on a terminal too narrow for all
WIDEST = 1000
ECHO = 2  # columns of the `^C` that a terminal writes behind the table, which must not begin another line

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
            self._live.update(fitting(statuses, self._console), refresh=True)
        elif time.monotonic() - self._last_plain >= self._plain_seconds:
            self._last_plain = time.monotonic()
            self.message(in_words(statuses))

    def message(self, text: str) -> None:
        """Shows a line, above the table if there is one."""
        self._console.print(printable(text), soft_wrap=self._live is None)

    def close(self) -> None:
        """Leaves the last table standing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> FleetView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fitting(statuses: Mapping[str, Status], console: Console) -> Table:
    """The table with as many of its columns as the terminal has room for."""
    columns, anything = list(COLUMNS), console.options.update(width=WIDEST)
    for column in FIRST_TO_GO:
        if console.measure(table(statuses, columns), options=anything).maximum <= console.width - ECHO:
            break
        columns.remove(column)
    return table(statuses, columns)


def table(statuses: Mapping[str, Status], columns: Sequence[str] = COLUMNS) -> Table:
    """A row for each island."""
    made = Table(box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="left" if column in ("island", "state") else "right", no_wrap=True)
    for name, status in statuses.items():
        known = {"island": name, **cells(status)}
        made.add_row(*(known.get(column, "") for column in columns))
    return made


def cells(status: Status) -> dict[str, str]:
    """The columns behind the name; of an island that has not made a step what it does."""
    state = str(status.get("state", "starting"))
    if not status or "loss" not in status:
        return {"state": state}
    return {
        "state": state,
        "step": f"{status['step']}/{status['steps']}",
        "loss": "" if status["loss"] is None else f"{status['loss']:.4f}",
        "tokens/s": f"{status.get('tokens_per_second') or 0:,.0f}",
        "round": str(status["round"]),
        "members": str(len(cast(list, status.get("members", [])))),
        "waited": f"{status.get('waiting_seconds') or 0:.1f} s",
        "sent": decimal(cast(int, status.get("network_bytes_sent") or 0)),
    }


def in_words(statuses: Mapping[str, Status]) -> str:
    """The fleet in a plain line: its round, and where each island is."""
    parts = [_in_words(name, cells(status)) for name, status in statuses.items()]
    speeds = [status.get("tokens_per_second") for status in statuses.values() if status.get("state") == "training"]
    if members := len(_fleet(statuses)):
        number = max(cast(int, status.get("round", -1)) for status in statuses.values())
        together = sum(cast(float, speed) for speed in speeds if speed)
        parts.insert(0, f"round {number}, {members} member{'s' * (members > 1)}, {together:,.0f} tokens/s")
    return "; ".join(parts)


def _in_words(name: str, known: Mapping[str, str]) -> str:
    if "step" not in known:
        return f"{name} {known['state']}"
    state = "" if known["state"] == "training" else f" {known['state']},"
    return f"{name}{state} step {known['step']}, loss {known['loss'] or '-'}"


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
