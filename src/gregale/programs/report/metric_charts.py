"""Provides the charts of metrics: their groups, their headings, and the points that they show."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

import numpy as np

from gregale.programs.report.runs import ReportRun, accumulated
from gregale.runs.history import Column, spikes_kept
from gregale.tracking.metrics import POSITION_LOSS, metric_of
from gregale.web.document import Lines, Series, colour_of

MAX_BINS = 1000  # of a line; a chart is rarely wider in pixels
BINS_IN_ALL = 2500  # of one metric over all runs
MIN_BINS = 40
DOTS = 200  # a line with fewer points shows dots


@dataclass(frozen=True)
class Kind:
    """A chart of metrics."""

    group: str
    title: str
    names: str  # a pattern that matches the full metric names
    unit: str | None = None  # unit of y; None: from the name's suffix
    help: str = ""
    alone: bool = False  # with several runs, each metric has its own chart
    stairs: bool = False


KINDS = (
    Kind("Loss", "Loss", r"loss|eval_loss", "", "Nats per token; eval_loss is on held-out text.", alone=True),
    Kind("Loss", "Bits per byte, held out", r"bits_per_byte", "", "Per byte of text, for any tokenizer."),
    Kind("Loss", "Held-out loss by source", r"eval_loss\..+", ""),
    Kind("Loss", "Bits per byte by source", r"bits_per_byte\..+", ""),
    Kind("Loss", "Held-out loss by tag", r"eval_loss_(tag\..+|macro|micro)", "", "macro: mean of the tags."),
    Kind("Loss", "Bits per byte by tag", r"bits_per_byte_tag\..+", ""),
    Kind("Loss", "Held-out loss by length of the sequences", r"eval_loss_length\..+", ""),
    Kind("Loss", "Loss of each replica", r"loss_\d+", ""),
    Kind("Loss", "Between the best and the worst replica", r"loss_spread", ""),
    Kind("Tasks", "Answered right", r"acc\..+", "share"),
    Kind("Tasks", "Answered right, by log-likelihoods a character", r"acc_norm\..+", "share"),
    Kind("Tasks", "Standard errors of answered right", r"acc(_norm)?_stderr\..+", "share"),
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
    Kind("Layers", "Largest load of an expert over the mean", r"expert_load_max(/.+)?", ""),
    Kind("Layers", "Smallest load of an expert over the mean", r"expert_load_min(/.+)?", ""),
    Kind("Layers", "Entropy of the experts' loads", r"expert_load_entropy(/.+)?", "", "1: equal loads."),
    Kind("Optimisation", "Imbalance of the experts", r"expert_imbalance", "", "1: equal loads."),
    Kind("Speed", "Tokens a second", r"tokens_per_second", ""),
    Kind("Speed", "Model FLOPs utilisation", r"mfu", "share"),
    Kind("Speed", "Time of a step", r"step_seconds", "seconds"),
    Kind("Speed", "Goodput", r"goodput", "share"),
    Kind("Speed", "Time outside steps", r".*_seconds", "seconds", "Total since the run began."),
    Kind("Speed", "Memory", r".*memory.*", "bytes"),
    Kind("Network", "Sent over the slow link by a device", r"replica_bytes", "bytes"),
    Kind("Network", "Sent and received by an island", r"network_bytes_(sent|received)", "bytes"),
    Kind("Network", "Members of the fleet", r"members", "", "In the newest round at each step.", stairs=True),
    Kind("Network", "Rounds", r"round", "", stairs=True),
)
LEFT_OUT = {"tokens", "elapsed_seconds", "steps_since_sync"}  # axes, and the metric that the schedule chart shows
OF_A_PART = "/"  # in the names of metrics of a layer or an array
OF_A_START = r".*_seconds|network_bytes_.*"  # counts that restart at 0 with each start
SHARES = ("_share", "_fraction", "_ratio")
TITLES = {"loss": "Training loss", "eval_loss": "Held-out loss"}


def groups_of(runs: Sequence[ReportRun]) -> Iterator[tuple[str, list[Lines]]]:
    """Yield the headings with their charts; metrics with unknown names are under "More".

    Metrics of single layers are shown only for one run, because several runs would have hundreds of lines.
    """
    without = LEFT_OUT.union(silent(runs))
    left = [*dict.fromkeys(name for run in runs for name in run.history.figures if name not in without)]
    if len(runs) > 1:
        left = [name for name in left if OF_A_PART not in name]
    found: dict[str, list[Lines]] = {}
    if positions := [name for name in left if name.startswith(POSITION_LOSS)]:
        found["Loss"] = [_by_position(positions, runs)]
        left = [name for name in left if name not in positions]
    for kind in KINDS:
        names = [name for name in left if re.fullmatch(kind.names, name)]
        left = [name for name in left if name not in names]
        split = kind.alone and len(runs) > 1
        for some in [[name] for name in names] if split else [names] if names else []:
            titled = replace(kind, title=TITLES.get(some[0], some[0])) if split else kind
            found.setdefault(kind.group, []).append(_chart(titled, some, runs))
    for name in left:
        found.setdefault("More", []).append(_chart(Kind("More", name, name), [name], runs))
    yield from found.items()


def silent(runs: Sequence[ReportRun]) -> list[str]:
    """Return the metrics that are always 0 in all runs."""
    columns: dict[str, list[Column]] = {}
    for run in runs:
        for name, column in run.history.figures.items():
            columns.setdefault(name, []).append(column)
    return [name for name, found in columns.items() if all((column.values == 0).all() for column in found)]


def without_number(run: ReportRun) -> list[str]:
    """Return a sentence for each metric that has steps without a finite value."""
    sentences = []
    for name, column in run.history.figures.items():
        missing = column.steps[~np.isfinite(column.values)]
        if len(missing):
            some = (
                "all of its" if len(missing) == len(column.steps) else f"{len(missing):,} of its {len(column.steps):,}"
            )
            sentences.append(f"{run.label}: `{name}` is no number at {some} steps, first at step {missing[0]:,}.")
    return sentences


def line(run: ReportRun, column: Column, label: str, bins: int, **look) -> Series:
    """Return a line with few points, all spikes, and the means for smoothing."""
    kept = spikes_kept(column.values, bins)
    means = None if len(kept) == len(column.steps) else _means(column, bins)
    return Series(label, column.steps[kept], column.values[kept], means, run=run.place, **look)


def bins_for(runs: int) -> int:
    """Return the maximum number of bins of a line, for this number of runs."""
    return max(MIN_BINS, min(MAX_BINS, BINS_IN_ALL // runs))


def _chart(kind: Kind, names: Sequence[str], runs: Sequence[ReportRun]) -> Lines:
    series = []
    for run in runs:
        for index, name in enumerate(names):
            column = run.column(name)
            if column is None or not len(column.steps):
                continue
            if re.fullmatch(OF_A_START, name) and name != "step_seconds":
                column = accumulated(column, run.starts)
            short = name.partition(OF_A_PART)[2] or name  # the chart's heading has the rest of a layer's metric
            label = short if len(runs) == 1 else run.label if len(names) == 1 else f"{run.label}: {name}"
            series.append(
                line(
                    run,
                    column,
                    label,
                    bins_for(len(runs) * len(names)),
                    colour=colour_of(index if len(runs) == 1 else run.place),
                    dashed=len(runs) > 1 and index > 0,
                    dots=len(column.steps) < DOTS and not kind.stairs,
                    stairs=kind.stairs,
                )
            )
    unit = _unit(names[0]) if kind.unit is None else kind.unit
    key = quote(f"figures-{names[0]}", errors="surrogatepass")  # quoted, so that HTML keeps any name
    return Lines(key, kind.title, series, unit, help=kind.help or _meaning(names))


def _by_position(names: Sequence[str], runs: Sequence[ReportRun]) -> Lines:
    """Return the chart of the last losses of each run by position, at the first position of each range."""
    series = []
    for run in runs:
        columns = {int(name.removeprefix(POSITION_LOSS)): run.column(name) for name in names}
        last = [(first, each.values[-1]) for first, each in columns.items() if each is not None and len(each.steps)]
        if last:
            x, y = (np.array(part) for part in zip(*sorted(last), strict=True))
            series.append(Series(run.label, x, y, colour=colour_of(run.place), dots=True))
    title, axis = "Held-out loss by position in the document", ("Position", "")
    return Lines("figures-by-position", title, series, axis=axis, help="Nats per token, of the last evaluation.")


def _meaning(names: Sequence[str]) -> str:
    """Return the meaning of a chart's only metric as a sentence; else empty."""
    metric = metric_of(names[0]) if len(names) == 1 else None
    if metric is None:
        return ""
    words = metric.meaning.replace("`", "")
    return f"{words[:1].upper()}{words[1:]}."


def _unit(name: str) -> str:
    if name.endswith("_seconds"):
        return "seconds"
    if "bytes" in name and "per_byte" not in name:
        return "bytes"
    return "share" if name.endswith(SHARES) else ""


def _means(column: Column, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the last step of each bin, and the mean of its finite values."""
    size = -(-len(column.steps) // bins)
    starts = np.arange(0, len(column.steps), size)
    finite = np.isfinite(column.values)
    sums = np.add.reduceat(np.where(finite, column.values, 0.0), starts)
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    ends = np.append(starts[1:], len(column.steps)) - 1
    with np.errstate(invalid="ignore"):
        return column.steps[ends], sums / counts
