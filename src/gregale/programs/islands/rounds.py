"""What islands did in their rounds, as they wrote it down, and a picture of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gregale.services.entries import read_entries
from gregale.services.history import ROUNDS
from gregale.storage import Place
from gregale.timeline.plot import LINE_COLOURS, new_figure, save_figure

LATEST = 40

SHORTEST_WAIT = 0.02  # in seconds; shorter ones are no waiting, and a bar could not show them
KINDS = {  # by name in the legend: colour and height of a bar
    "under way": (LINE_COLOURS[0], 0.7),
    "waited for": (LINE_COLOURS[3], 0.35),
    "healing": (LINE_COLOURS[1], 0.7),
}

Round = Mapping[str, float]


def rounds_of(run: Place) -> list[Round]:
    """The rounds of an island, oldest first; damaged lines are left out."""
    return [*read_entries(run / ROUNDS, number="round").entries]


def draw_rounds(path: Path, rounds: Mapping[str, Sequence[Round]]) -> None:
    """A row for each island: when its rounds were under way, when it waited for them, and when it healed.

    The latest rounds only, so that they can be told apart. Raises `UserError` if it cannot be drawn.
    """
    newest = max(each["round"] for of_one in rounds.values() for each in of_one)
    shown = {name: [each for each in of_one if each["round"] > newest - LATEST] for name, of_one in rounds.items()}
    first = min(each["began"] for of_one in shown.values() for each in of_one)
    figure = new_figure(path, (9.0, 1.2 + 0.45 * len(rounds)))
    axes = figure.subplots()
    for kind, (colour, height) in KINDS.items():
        label: str | None = kind
        for row, of_one in enumerate(shown.values()):
            spans = [(each[0] - first, each[1]) for each in _spans(of_one, kind)]
            if spans:
                bars = (row - height / 2, height)
                axes.broken_barh(spans, bars, color=colour, linewidth=0, label=label)
                label = None  # once in the legend
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.grid(alpha=0.3, axis="x")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    save_figure(figure, path)


def _spans(rounds: Sequence[Round], kind: str) -> list[tuple[float, float]]:
    """Beginning and length of what is shown as one kind, in seconds."""
    if kind == "waited for":
        waits = [(each["ended"], each["waiting_seconds"]) for each in rounds]
        return [(ended - waited, waited) for ended, waited in waits if waited >= SHORTEST_WAIT]
    healing = kind == "healing"
    return [(each["began"], each["seconds"]) for each in rounds if bool(each.get("healed")) == healing]
