"""Draw a round of islands for docs/islands.md: `python benchmarks/islands_figure.py docs/figures`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from gregale.timeline.plot import INK, KIND_COLOURS, LINE_COLOURS, new_figure, save_figure

VIEW, END = 5.6, 12.4
PARTS = {  # of a round, on the host: when, in units of the fast island's steps
    "leg 1": (VIEW, 1.3),
    "leg 2": (VIEW + 1.5, 1.1),
    "outer step": (VIEW + 2.7, 0.5),
}
COMMIT = VIEW + 3.9
COLOURS = {"step": KIND_COLOURS["forward"], "message down": LINE_COLOURS[1]} | dict(
    zip(PARTS, (LINE_COLOURS[4], LINE_COLOURS[0], LINE_COLOURS[2]), strict=True)
)


class Row(NamedTuple):
    """An island: how long its steps take, when the first shown one begins, and the step after which it hands over."""

    name: str
    step: float
    begins: float
    snapshot: float
    note: str


ROWS = (
    Row("island a\n(fastest)", 1.0, 0.0, 4.0, "H steps: due"),
    Row("island b", 1.3, -0.4, 4.8, "its next step boundary"),
    Row("island c\n(a third as fast)", 3.0, -1.2, 4.8, "its next step boundary"),
)


def draw(path: Path) -> None:
    """Compute above and the round's way below, for each island."""
    figure = new_figure(path, (9.0, 4.6))
    axes = figure.subplots()
    for place, row in enumerate(ROWS):
        top = -2.6 * place
        begin, arrives = row.begins, None
        while begin < END:
            axes.broken_barh(
                [(max(0, begin) + 0.03, row.step - max(0, -begin) - 0.06)], (top, 0.8), color=COLOURS["step"]
            )
            begin += row.step
            if arrives is None and begin >= COMMIT - 1e-9:
                arrives = begin
        assert arrives is not None
        axes.broken_barh([(row.snapshot, 0.5)], (top - 1.0, 0.7), color=COLOURS["message down"])
        for kind, (start, length) in PARTS.items():
            axes.broken_barh([(start, length)], (top - 1.0, 0.7), color=COLOURS[kind])
        axes.annotate(
            row.note, (row.snapshot, top - 0.15), (row.snapshot - 0.1, top - 0.7), ha="right", fontsize=8, color=INK
        )
        axes.plot([row.snapshot] * 2, [top - 1.0, top + 0.8], color=COLOURS["message down"], linewidth=1.5)
        axes.plot([arrives] * 2, [top - 1.0, top + 0.8], color=LINE_COLOURS[3], linewidth=1.5)
        axes.annotate("mixed in", (arrives, top - 0.5), (arrives + 0.1, top - 0.75), fontsize=8, color=INK)
    for at, label in (
        (VIEW - 0.12, "view: who is in,\nwith which weight"),
        (COMMIT, "view: all hold the\nsame result: commit"),
    ):
        axes.plot([at, at], [-2.6 * (len(ROWS) - 1) - 1.2, 1.0], color=INK, linestyle="--", linewidth=1.0)
        axes.annotate(label, (at, 1.0), (at, 1.1), ha="center", va="bottom", fontsize=8, color=INK)
    for label, colour in COLOURS.items():
        axes.broken_barh([(0, 0)], (0, 0), color=colour, label=label)
    axes.set_yticks([-2.6 * place + 0.1 for place in range(len(ROWS))], [row.name for row in ROWS])
    axes.set_xticks([])
    axes.set_xlim(0, END)
    axes.set_ylim(-2.6 * (len(ROWS) - 1) - 1.2, 2.0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    save_figure(figure, path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) / f"islands-round.{sys.argv[2] if len(sys.argv) > 2 else 'svg'}")
