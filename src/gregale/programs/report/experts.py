"""Provides the chart of the loads of experts: a row for each layer, a colour for the size of the largest load."""

from collections.abc import Sequence
from itertools import pairwise

from gregale.programs.report.runs import ReportRun
from gregale.web.document import Row, Span, Spans

PREFIX = "expert_load_max/layer."
LIMITS = (1.25, 1.5, 2.0, 4.0)  # between the kinds


def load_chart(run: ReportRun) -> Spans | None:
    """Return the largest load of each layer over the steps; None for a run without experts."""
    layers = sorted(int(name.removeprefix(PREFIX)) for name in run.history.figures if name.startswith(PREFIX))
    if not layers:
        return None
    kinds = (
        f"up to {LIMITS[0]:g}",
        *(f"{low:g} to {high:g}" for low, high in pairwise(LIMITS)),
        f"over {LIMITS[-1]:g}",
    )
    return Spans(
        f"loads-{run.place}",
        f"Largest load of an expert over the mean, {run.label}",
        [Row(f"layer {layer}", _spans(run, f"{PREFIX}{layer}")) for layer in layers],
        kinds,
        ("Steps", ""),
        "A row is a layer. 1: all experts have equally many tokens.",
    )


def _spans(run: ReportRun, name: str) -> Sequence[Span]:
    column = run.history.figures[name]
    ends = [*column.steps.tolist()[1:], run.history.figures.last_step]
    return [
        Span(step, max(end, step + 1), sum(value > limit for limit in LIMITS), f"Step {step:,}: {value:.2f}")
        for step, end, value in zip(column.steps.tolist(), ends, column.values.tolist(), strict=True)
    ]
