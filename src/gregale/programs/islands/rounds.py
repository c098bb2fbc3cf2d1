"""What islands did in their rounds, as they wrote it down, and a picture of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from gregale.timeline.plot import LINE_COLOURS, new_figure, save_figure

ROUNDS = "rounds.jsonl"
LATEST = 40

Round = Mapping[str, float]


def rounds_of(run: Path) -> list[Round]:
    """The rounds of an island, oldest first; a line that a killed process left torn is passed over."""
    path = run / ROUNDS
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def draw_rounds(path: Path, rounds: Mapping[str, Sequence[Round]]) -> None:
    """A row for each island: when its rounds were under way, when it waited for them, and when it healed.

    The latest rounds only, so that they can be told apart. Raises `UserError` if it cannot be drawn.
    """
    newest = max(each["round"] for of_one in rounds.values() for each in of_one)
    shown = {name: [each for each in of_one if each["round"] > newest - LATEST] for name, of_one in rounds.items()}
    first = min(each["began"] for of_one in shown.values() for each in of_one)
    figure = new_figure(path, (9.0, 1.2 + 0.45 * len(rounds)))
    axes = figure.subplots()
    kinds = {
        "exchange": (LINE_COLOURS[0], "under way"),
        "waiting": (LINE_COLOURS[3], "waited for"),
        "healing": (LINE_COLOURS[1], "healing"),
    }
    for row, of_one in enumerate(shown.values()):
        spans = {
            "exchange": [(each["began"] - first, each["seconds"]) for each in of_one if not each.get("healed")],
            "waiting": [(each["ended"] - first - each["waiting_seconds"], each["waiting_seconds"]) for each in of_one],
            "healing": [(each["began"] - first, each["seconds"]) for each in of_one if each.get("healed")],
        }
        for kind, (colour, label) in kinds.items():
            height = 0.35 if kind == "waiting" else 0.7
            axes.broken_barh(spans[kind], (row - height / 2, height), color=colour, label=label if row == 0 else None)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.grid(alpha=0.3, axis="x")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    save_figure(figure, path)
