"""The lines of runs: which figures stand in one chart, under which heading, and which of their points are drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

import numpy as np

from gregale.programs.report.runs import ReportRun, accumulated
from gregale.runs.history import Column, spikes_kept
from gregale.tracking.metrics import metric_of
from gregale.web import Lines, Series, colour_of

MOST_BUCKETS = 1000  # of a line; a chart is seldom wider in pixels
BUCKETS_IN_ALL = 2500  # of one figure, of all runs
FEWEST_BUCKETS = 40
DOTS = 200  # a line of fewer points shows them


@dataclass(frozen=True)
class Kind:
    """A chart of figures.

    - `names`: a pattern that their names match as a whole
    - `unit`: of y; None: as the name ends
    - `alone`: with several runs a figure has a chart of its own
    """

    group: str
    title: str
    names: str
    unit: str | None = None
    help: str = ""
    alone: bool = False
    stairs: bool = False


KINDS = (
    Kind("Loss", "Loss", r"loss|eval_loss", "", "Nats a token; eval_loss is of text that is held out.", alone=True),
    Kind("Loss", "Bits per byte, held out", r"bits_per_byte", "", "By bytes of text, whatever the tokenizer."),
    Kind("Loss", "Held-out loss by source", r"eval_loss\..+", ""),
    Kind("Loss", "Bits per byte by source", r"bits_per_byte\..+", ""),
    Kind("Loss", "Loss of each replica", r"loss_\d+", ""),
    Kind("Loss", "Between the best and the worst replica", r"loss_spread", ""),
    Kind("Tasks", "Answered right", r"acc\..+", "share"),
    Kind("Tasks", "Answered right, by log-likelihoods a character", r"acc_norm\..+", "share"),
    Kind("Tasks", "Standard errors of what is answered right", r"acc(_norm)?_stderr\..+", "share"),
    Kind("Tasks", "Perplexity of the answers", r"perplexity\..+", ""),
    Kind("Tasks", "Standard errors of the perplexity", r"perplexity_stderr\..+", ""),
    Kind("Optimisation", "Gradient norm", r"grad_norm", ""),
    Kind("Optimisation", "Learning rate", r"learning_rate", ""),
    Kind("Optimisation", "Norm of the pseudo-gradient", r"outer_grad_norm", ""),
    Kind("Optimisation", "Agreement of the replicas", r"outer_grad_cosine", ""),
    Kind("Optimisation", "Skipped steps", r"skipped", "", stairs=True),
    Kind("Optimisation", "Lost to quantisation", r"quantisation_error", ""),
    Kind("Optimisation", "Kept by error feedback", r"feedback_norm", ""),
    Kind("Layers", "Norm of the parameters", r"parameter_norm(/.+)?", ""),
    Kind("Layers", "Norm of the gradients", r"grad_norm/.+", ""),
    Kind("Layers", "Update / weight", r"update_ratio(/.+)?", "", "Norms, of an inspected step."),
    Kind("Layers", "Largest logit of attention", r"attention_logit_max(/.+)?", ""),
    Kind("Speed", "Tokens a second", r"tokens_per_second", ""),
    Kind("Speed", "Model FLOPs utilisation", r"mfu", "share"),
    Kind("Speed", "Time of a step", r"step_seconds", "seconds"),
    Kind("Speed", "Goodput", r"goodput", "share"),
    Kind("Speed", "Time beside the steps", r".*_seconds", "seconds", "In all, since the run began."),
    Kind("Speed", "Memory", r".*memory.*", "bytes"),
    Kind("Network", "Sent over the slow link, of a device", r"replica_bytes", "bytes"),
    Kind("Network", "Sent and received by an island", r"network_bytes_(sent|received)", "bytes"),
    Kind("Network", "Members of the fleet", r"members", "", "In the newest round then.", stairs=True),
    Kind("Network", "Rounds", r"round", "", stairs=True),
)
LEFT_OUT = {"tokens", "elapsed_seconds", "steps_since_sync"}  # axes, and what the schedule shows
OF_A_PART = "/"  # in the names of figures of a layer or an array
OF_A_START = r".*_seconds|network_bytes_.*"  # counts that begin at 0 with each
SHARES = ("_share", "_fraction", "_ratio")


def groups_of(runs: Sequence[ReportRun]) -> Iterator[tuple[str, list[Lines]]]:
    """The headings with their charts; a figure of a name that is not known stands under "More".

    Those of single layers are shown of one run alone: of several they would be hundreds of lines.
    """
    without = LEFT_OUT.union(silent(runs))
    left = [*dict.fromkeys(name for run in runs for name in run.history.figures if name not in without)]
    if len(runs) > 1:
        left = [name for name in left if OF_A_PART not in name]
    found: dict[str, list[Lines]] = {}
    for kind in KINDS:
        names = [name for name in left if re.fullmatch(kind.names, name)]
        left = [name for name in left if name not in names]
        split = kind.alone and len(runs) > 1
        for some in [[name] for name in names] if split else [names] if names else []:
            titled = replace(kind, title=_title(some[0])) if split else kind
            found.setdefault(kind.group, []).append(_chart(titled, some, runs))
    for name in left:
        found.setdefault("More", []).append(_chart(Kind("More", name, name), [name], runs))
    yield from found.items()


def silent(runs: Sequence[ReportRun]) -> list[str]:
    """The figures that are 0 in all runs from begin to end."""
    columns: dict[str, list[Column]] = {}
    for run in runs:
        for name, column in run.history.figures.items():
            columns.setdefault(name, []).append(column)
    return [name for name, found in columns.items() if all((column.values == 0).all() for column in found)]


def without_number(run: ReportRun) -> list[str]:
    """In a sentence for each figure, where it is no number."""
    told = []
    for name, column in run.history.figures.items():
        missing = column.steps[~np.isfinite(column.values)]
        if len(missing):
            some = (
                "all of its" if len(missing) == len(column.steps) else f"{len(missing):,} of its {len(column.steps):,}"
            )
            told.append(f"{run.label}: `{name}` is no number at {some} steps, first at step {missing[0]:,}.")
    return told


def line(run: ReportRun, column: Column, label: str, buckets: int, **look) -> Series:
    """A line with few of its points and none of its spikes missing, and the means that smoothing starts from."""
    kept = spikes_kept(column.values, buckets)
    means = None if len(kept) == len(column.steps) else _means(column, buckets)
    return Series(label, column.steps[kept], column.values[kept], means, run=run.place, **look)


def buckets_for(runs: int) -> int:
    """How many buckets a line may have where there are so many runs."""
    return max(FEWEST_BUCKETS, min(MOST_BUCKETS, BUCKETS_IN_ALL // runs))


def _chart(kind: Kind, names: Sequence[str], runs: Sequence[ReportRun]) -> Lines:
    series = []
    for run in runs:
        for place, name in enumerate(names):
            column = run.column(name)
            if column is None or not len(column.steps):
                continue
            if re.fullmatch(OF_A_START, name) and name != "step_seconds":
                column = accumulated(column, run.starts)
            label = _short(name) if len(runs) == 1 else run.label if len(names) == 1 else f"{run.label}: {name}"
            series.append(
                line(
                    run,
                    column,
                    label,
                    buckets_for(len(runs) * len(names)),
                    colour=colour_of(place if len(runs) == 1 else run.place),
                    dashed=len(runs) > 1 and place > 0,
                    dots=len(column.steps) < DOTS and not kind.stairs,
                    stairs=kind.stairs,
                )
            )
    unit = _unit(names[0]) if kind.unit is None else kind.unit
    key = quote(f"figures-{names[0]}", errors="surrogatepass")  # of any name one that HTML leaves as it is
    return Lines(key, kind.title, series, unit, help=kind.help or _meaning(names))


def _short(name: str) -> str:
    """A figure of a layer by the layer's name, under whose heading it stands."""
    return name.partition(OF_A_PART)[2] or name


def _meaning(names: Sequence[str]) -> str:
    """What is known of the only figure of a chart, in a sentence."""
    metric = metric_of(names[0]) if len(names) == 1 else None
    if metric is None:
        return ""
    words = metric.meaning.replace("`", "")
    return f"{words[:1].upper()}{words[1:]}."


def _title(name: str) -> str:
    return {"loss": "Training loss", "eval_loss": "Held-out loss"}.get(name, name)


def _unit(name: str) -> str:
    if name.endswith("_seconds"):
        return "seconds"
    if "bytes" in name and "per_byte" not in name:
        return "bytes"
    return "share" if name.endswith(SHARES) else ""


def _means(column: Column, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each bucket its last step and the mean of what are numbers in it."""
    size = -(-len(column.steps) // buckets)
    starts = np.arange(0, len(column.steps), size)
    finite = np.isfinite(column.values)
    sums = np.add.reduceat(np.where(finite, column.values, 0.0), starts)
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    ends = np.append(starts[1:], len(column.steps)) - 1
    with np.errstate(invalid="ignore"):
        return column.steps[ends], sums / counts
