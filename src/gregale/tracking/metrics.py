"""The name, unit and meaning of every metric. The documentation site builds the table of docs/metrics.md from it.

    metric_of("loss").unit                    # "nats a token"
    metric_of("grad_norm/layer.3").meaning    # of the family `grad_norm/<part>`
    metric_of("nonsense")                     # None

The names are the same in `metrics.jsonl`, TensorBoard, Weights & Biases and trackio.
"""

import re
from dataclasses import dataclass
from functools import cache

from gregale.formatting import format_quantity

METRICS_FILE = "metrics.jsonl"  # of a run, with a line for each logged step and for each evaluation
POSITION_LOSS = "eval_loss_position."  # the first part of names
STEP, EVALUATION, INSPECTED = "step", "evaluation", "inspected step"


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of metrics: `<...>` stands for a number or a name.

    - `when`: the lines that contain it: logged steps, evaluations, or the steps of `inspect.every`
    - `where`: the runs that have it; empty: all runs
    - `label`: its word in the lines about time and memory of `gregale watch`; empty: it is in neither
    """

    name: str
    unit: str
    meaning: str
    when: str = STEP
    where: str = ""
    label: str = ""


_REPLICAS = "replicas apart"
_ISLANDS = "islands"
_TASKS = "[`evaluation.tasks`](evaluation.md#tasks)"
_LOADS = (INSPECTED, "`model.experts`")
_GROUPS = "`inspect.granularity: array`, if rates differ"
_TAGS = "`tags` of a source"
_LENGTHS, _BY = "`evaluation.sequence_lengths`", "`evaluation.by_position`"
_OF_START = "since this start of the run"

METRICS = (
    Metric("loss", "nats a token", "mean over the tokens of the step's batch, of all replicas"),
    Metric("loss_<replica>", "nats a token", "of each replica", where=_REPLICAS),
    Metric("loss_spread", "nats a token", "the largest replica's less the smallest's", where=_REPLICAS),
    Metric("grad_norm", "", "norm of the averaged gradient before clipping; the replicas' mean where they are apart"),
    Metric("outer_grad_norm", "", "of the last pseudo-gradient that was sent since the line before", where=_REPLICAS),
    Metric("outer_grad_cosine", "", "similarity of the replicas' pseudo-gradients, mean of pairs", where=_REPLICAS),
    Metric("learning_rate", "", "of the step's update"),
    Metric("skipped", "steps", "left out so far because loss or gradient was not finite", where="once there are any"),
    Metric("spikes", "steps", "left out so far as spikes (`skip_spikes`)", where="once there are any"),
    Metric("tokens", "tokens", "seen since the run began"),
    Metric("tokens_per_second", "tokens/s", "of all devices, over the last 20 steps at most; pauses do not count"),
    Metric("mfu", "share of 1", "model FLOPs utilisation: what goes into the model of the chips' peak", where="chips"),
    Metric("step_seconds", "s", "a step, over the last 20 at most; pauses do not count"),
    Metric("elapsed_seconds", "s", _OF_START),
    Metric("data_seconds", "s", f"waited for batches {_OF_START}", label="data"),
    Metric("evaluation_seconds", "s", f"spent on evaluations and samples {_OF_START}", label="evaluation"),
    Metric(
        "saving_seconds",
        "s",
        f"stood still for checkpoints {_OF_START}; they are written in the background",
        label="saving",
    ),
    Metric("inspection_seconds", "s", f"spent on inspections {_OF_START}", where="`inspect.every`", label="inspection"),
    Metric("profile_seconds", "s", f"spent on traces {_OF_START}", where="`--profile`"),
    Metric("callback_seconds", "s", f"in which callbacks stopped the loop {_OF_START}", where="`callbacks`"),
    Metric("host_memory_bytes", "bytes", "of process 0 in its host's memory", label="host"),
    Metric(
        "device_memory_bytes",
        "bytes",
        "in use, of the device of process 0 that has most",
        where="GPU, TPU",
        label="device",
    ),
    Metric("device_memory_peak_bytes", "bytes", "the maximum in use on that device", where="GPU, TPU", label="at most"),
    Metric("replica_bytes", "bytes", "a device has sent over `replica` since the run began"),
    Metric("steps_since_sync", "steps", "since a fragment was last sent", where=_REPLICAS),
    Metric("round", "", "the fleet's newest that this island knows of", where=_ISLANDS),
    Metric("members", "islands", "in that round", where=_ISLANDS),
    Metric("waiting_seconds", "s", f"waited for the network {_OF_START}", where=_ISLANDS, label="network"),
    Metric("healing_seconds", "s", f"spent on healing {_OF_START}", where=_ISLANDS, label="healing"),
    Metric("network_bytes_sent", "bytes", f"over the network {_OF_START}", where=_ISLANDS),
    Metric("network_bytes_received", "bytes", f"over the network {_OF_START}", where=_ISLANDS),
    Metric("goodput", "share of 1", "of the time since the first step that was not waited or healed", where=_ISLANDS),
    Metric("parameter_norm", "", "norm of all parameters before the step", INSPECTED),
    Metric("parameter_norm/<part>", "", "of a layer or an array", INSPECTED),
    Metric("grad_norm/<part>", "", "of the averaged gradient before clipping", INSPECTED),
    Metric("update_ratio", "", "norm of the step's update / norm of the parameters", INSPECTED),
    Metric("update_ratio/<part>", "", "of a layer or an array; null where parameters are 0", INSPECTED),
    Metric("peak_rate/<part>", "", "of an array's learning rate", INSPECTED, _GROUPS),
    Metric("attention_logit_max", "", "the largest logit of attention in the batch, of all layers", INSPECTED),
    Metric("attention_logit_max/<part>", "", "of a layer", INSPECTED),
    Metric("expert_load_max", "", "the largest number of tokens of an expert over the mean, a step before", *_LOADS),
    Metric("expert_load_min", "", "the smallest", *_LOADS),
    Metric("expert_load_entropy", "", "of the loads, over that of equal ones: the least of all layers", *_LOADS),
    Metric("expert_load_<figure>/<part>", "", "of a layer", *_LOADS),
    Metric("eval_reward_<figure>", "", "of `reward_<figure>`, on held-out pairs", EVALUATION, "`objective.type: dpo`"),
    Metric("eval_loss", "nats a token", "on held-out text, or on all of data.validation without one", EVALUATION),
    Metric("bits_per_byte", "bits a byte", "the same by bytes of text, whatever the tokenizer", EVALUATION),
    Metric("eval_loss.<source>", "nats a token", "on a validation source", EVALUATION, "`data.validation`"),
    Metric("bits_per_byte.<source>", "bits a byte", "on a validation source", EVALUATION, "`data.validation`"),
    Metric("eval_loss_tag.<tag>", "nats a token", "on all held-out text with a tag", EVALUATION, _TAGS),
    Metric("bits_per_byte_tag.<tag>", "bits a byte", "the same by bytes of text", EVALUATION, _TAGS),
    Metric("eval_loss_macro", "nats a token", "mean of the losses of all tags", EVALUATION, _TAGS),
    Metric("eval_loss_micro", "nats a token", "mean over the tokens of all text with tags", EVALUATION, _TAGS),
    Metric("eval_loss_length.<tokens>", "nats a token", "in sequences of so many tokens", EVALUATION, _LENGTHS),
    Metric(f"{POSITION_LOSS}<first>", "nats a token", "of tokens from this place in a document on", EVALUATION, _BY),
    Metric("acc.<task>", "share of 1", "of the questions of a task that are answered right", EVALUATION, _TASKS),
    Metric("acc_norm.<task>", "share of 1", "the same by log-likelihoods a character", EVALUATION, _TASKS),
    Metric("perplexity.<task>", "", "of a task's answers", EVALUATION, _TASKS),
    Metric("<figure>_stderr.<task>", "", "standard error of each of these", EVALUATION, _TASKS),
    Metric("quantisation_error", "", "what a message lacks, relative to its values", EVALUATION, "`reduce.measure`"),
    Metric("energy_sent", "", "share of the values' squares that a message has", EVALUATION, "`reduce.measure`"),
    Metric("feedback_norm", "", "norm of what error feedback keeps", EVALUATION, "`reduce.measure`"),
)


def metric_of(name: str) -> Metric | None:
    """Return the metric of this name, or its family; None if there is none."""
    return next((metric for metric in METRICS if _pattern(metric.name).fullmatch(name)), None)


@cache
def _pattern(name: str) -> re.Pattern:
    """Return the pattern of a metric's names: `<replica>` is a number, any other `<...>` is any text."""
    text = re.escape(name).replace("<replica>", r"\d+")
    return re.compile(re.sub(r"<\w+>", ".+", text))


def in_unit(name: str, value: float | None) -> str:
    """Format a metric's value in its unit; return "" for None."""
    metric = metric_of(name)
    return "" if value is None else format_quantity(value, "" if metric is None else metric.unit)


SHARES = ("_share", "_fraction", "_ratio")


@dataclass(frozen=True)
class Chart:
    """A chart of metrics in reports."""

    group: str
    title: str
    names: str  # a pattern that matches the full metric names
    unit: str | None = None  # unit of y; None: from the name's suffix
    help: str = ""
    alone: bool = False  # with several runs, each metric has its own chart
    stairs: bool = False
    clipped: bool = False  # the axis leaves out values far above the others: steps that compile

    def unit_of(self, name: str) -> str:
        if self.unit is not None or name.endswith("_seconds"):
            return "seconds" if self.unit is None else self.unit
        if "bytes" in name and "per_byte" not in name:
            return "bytes"
        return "share" if name.endswith(SHARES) else ""


CHARTS = (
    Chart("Loss", "Loss", r"loss|eval_loss", "", "Nats per token; eval_loss is on held-out text.", alone=True),
    Chart("Loss", "Bits per byte, held out", r"bits_per_byte", "", "Per byte of text, for any tokenizer."),
    Chart("Loss", "Held-out loss by source", r"eval_loss\..+", ""),
    Chart("Loss", "Bits per byte by source", r"bits_per_byte\..+", ""),
    Chart("Loss", "Held-out loss by tag", r"eval_loss_(tag\..+|macro|micro)", "", "macro: mean of the tags."),
    Chart("Loss", "Bits per byte by tag", r"bits_per_byte_tag\..+", ""),
    Chart("Loss", "Held-out loss by length of the sequences", r"eval_loss_length\..+", ""),
    Chart("Loss", "Loss of each replica", r"loss_\d+", ""),
    Chart("Loss", "Between the best and the worst replica", r"loss_spread", ""),
    Chart("Tasks", "Answered right", r"acc\..+", "share"),
    Chart("Tasks", "Answered right, by log-likelihoods a character", r"acc_norm\..+", "share"),
    Chart("Tasks", "Standard errors of answered right", r"acc(_norm)?_stderr\..+", "share"),
    Chart("Tasks", "Perplexity of the answers", r"perplexity\..+", ""),
    Chart("Tasks", "Standard errors of the perplexity", r"perplexity_stderr\..+", ""),
    Chart("Optimisation", "Gradient norm", r"grad_norm", ""),
    Chart("Optimisation", "Learning rate", r"learning_rate", ""),
    Chart("Optimisation", "Norm of the pseudo-gradient", r"outer_grad_norm", ""),
    Chart("Optimisation", "Agreement of the replicas", r"outer_grad_cosine", ""),
    Chart("Optimisation", "Skipped steps", r"skipped", "", stairs=True),
    Chart("Optimisation", "Lost to quantisation", r"quantisation_error", ""),
    Chart("Optimisation", "Share of the energy sent", r"energy_sent", ""),
    Chart("Optimisation", "Kept by error feedback", r"feedback_norm", ""),
    Chart("Layers", "Norm of the parameters", r"parameter_norm(/.+)?", ""),
    Chart("Layers", "Norm of the gradients", r"grad_norm/.+", ""),
    Chart("Layers", "Update / weight", r"update_ratio(/.+)?", "", "Norms, of an inspected step."),
    Chart("Layers", "Largest logit of attention", r"attention_logit_max(/.+)?", ""),
    Chart("Layers", "Largest load of an expert over the mean", r"expert_load_max(/.+)?", ""),
    Chart("Layers", "Smallest load of an expert over the mean", r"expert_load_min(/.+)?", ""),
    Chart("Layers", "Entropy of the experts' loads", r"expert_load_entropy(/.+)?", "", "1: equal loads."),
    Chart("Optimisation", "Imbalance of the experts", r"expert_imbalance", "", "1: equal loads."),
    Chart("Speed", "Tokens a second", r"tokens_per_second", ""),
    Chart("Speed", "Model FLOPs utilisation", r"mfu", "share"),
    Chart("Speed", "Time of a step", r"step_seconds", "seconds", clipped=True),
    Chart("Speed", "Goodput", r"goodput", "share"),
    Chart("Speed", "Time outside steps", r".*_seconds", "seconds", "Total since the run began."),
    Chart("Speed", "Memory", r".*memory.*", "bytes"),
    Chart("Network", "Sent over the slow link by a device", r"replica_bytes", "bytes"),
    Chart("Network", "Sent and received by an island", r"network_bytes_(sent|received)", "bytes"),
    Chart("Network", "Members of the fleet", r"members", "", "In the newest round at each step.", stairs=True),
    Chart("Network", "Rounds", r"round", "", stairs=True),
)
LEFT_OUT = {"tokens", "elapsed_seconds", "steps_since_sync"}  # axes, and the metric that the schedule chart shows
SMOOTHED = r"loss(_\d+)?"  # the noisy losses, which reports smooth
OF_A_PART = "/"  # in the names of metrics of a layer or an array
OF_A_START = r".*_seconds|network_bytes_.*"  # counts that restart at 0 with each start
# The curves of `gregale watch`, the most important first; those of evaluations follow.
CURVES = (
    *("loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu"),
    *("loss_spread", "outer_grad_cosine", "goodput", "members", "update_ratio", "attention_logit_max"),
)
