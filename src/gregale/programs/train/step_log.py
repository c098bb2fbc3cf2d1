"""Provides the log of step metrics and its counts; it reads losses a few steps late so that the loop waits for none.

Also metrics of each layer: norms of parameters and gradients, ratios of updates, attention logits, expert loads. A
separate program repeats the computation of the next step without a change of the state, so that inspection does not
change the step's program. The error of quantised averages also has a separate program.

    inspector = Inspector(setup, method)
    metrics = inspector(state, batch)  # before the step that takes this batch
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from haliax import NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from gregale.axes.parameters import layers_axis, names_of_arrays
from gregale.cost.chips import of_device
from gregale.data.examples import MORE_BYTES, Examples
from gregale.data.mixtures import MixtureHistory, tokens_of
from gregale.distributed.liveness import Phase, Progress
from gregale.errors import UserError
from gregale.methods.method import Inspected, Method, Probe, PseudoGradientStats, cosine
from gregale.model.config import ModelMethods
from gregale.programs.runtime.batches import GlobalBatches
from gregale.programs.runtime.model_flops import model_flops
from gregale.programs.runtime.setup import Setup, rules_of
from gregale.runs.config import BatchConfig
from gregale.tracking.callback import Callback, Callbacks, Metrics, StepContext
from gregale.training.state import StepReport, TrainState

# Steps in the device's queue before the host reads the oldest loss. With one, a step is always queued. With more,
# simulated CPU devices in different steps could wait for one another because threads are few.
STEPS_AHEAD = 1


@dataclass(frozen=True)
class DataPosition:
    """Counts examples and tokens from the step at which the run resumes.

    - `first_step`: steps before the resumption
    - `examples_before`: examples of those steps; the next step begins at this example
    - `mixtures`: of the sources, so far
    """

    batch: BatchConfig
    first_step: int
    examples_before: int
    mixtures: MixtureHistory

    def examples(self, step: int) -> int:
        """Return the number of examples in the first `step` steps of the run."""
        return self.examples_before + (step - self.first_step) * self.batch.size

    def tokens(self, step: int) -> int:
        """Return the number of tokens in the first `step` steps of the run."""
        return tokens_of(self.mixtures, self.examples(step))


@dataclass(frozen=True)
class Traffic:
    """Counts the bytes that a device sends over `replica` from the step at which the run resumes.

    - `first_step`: steps before the resumption
    - `bytes_before`: bytes that a device sent in those steps, on all meshes and by all methods
    """

    setup: Setup
    first_step: int = 0
    bytes_before: int = 0

    def bytes_sent(self, step: int) -> int:
        """Return the bytes that a device has sent in the first `step` steps of the run."""
        return self.figures(step)["replica_bytes"]

    def figures(self, step: int) -> dict[str, int]:
        """Return `replica_bytes`: bytes sent so far; for DiLoCo also `steps_since_sync`: steps since the last sync."""
        figures, at_first = self.setup.traffic(step), self.setup.traffic(self.first_step)
        since = figures["replica_bytes"] - at_first["replica_bytes"]
        return {**figures, "replica_bytes": self.bytes_before + since}


class PhaseTimer:
    """Counts the seconds in which the loop's thread starts no step: waits for batches, evaluations, saves."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds = {"data_seconds": 0.0, "evaluation_seconds": 0.0, "saving_seconds": 0.0}

    @contextmanager
    def on(self, figure: str) -> Iterator[None]:
        """Count the seconds of the `with` block under this name."""
        began = time.monotonic()
        yield
        self._seconds[figure] = self._seconds.get(figure, 0.0) + time.monotonic() - began

    def figures(self) -> dict[str, float]:
        """Return `elapsed_seconds`, and the seconds of each phase."""
        return {"elapsed_seconds": time.monotonic() - self._began, **self._seconds}


class Rate:
    """Tokens per second and seconds per step, over a window of completed steps.

    Both are differences between two completions, so steps in flight on the device do not count. The first step, which
    includes compilation, leaves the window as soon as a second step is complete.
    """

    def __init__(self, now: float, window: int = 20):
        """`now`: start time of the first step, in seconds of any monotonic clock."""
        self._marks: deque[tuple[float, int, int]] = deque([(now, 0, 0)], maxlen=window + 1)
        self._holds_start = True

    def completed(self, tokens: int, now: float) -> None:
        """Record that another step is complete, with `tokens` tokens."""
        _, steps, before = self._marks[-1]
        self._marks.append((now, steps + 1, before + tokens))
        if self._holds_start and len(self._marks) == 3:
            self._marks.popleft()
            self._holds_start = False

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second; 0 until time has passed."""
        (start, _, before), (end, _, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start) if end > start else 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds per step; 0 until a step is complete."""
        (start, first, _), (end, last, _) = self._marks[0], self._marks[-1]
        return (end - start) / (last - first) if last > first else 0.0


@dataclass(frozen=True)
class Observers:
    """Observers of a training loop.

    - `callbacks`: the console, the trackers and the callbacks of the configuration
    - `report`: takes one line about a failure that does not end the run
    - `progress`: records the loop's phase, for hang detection
    - `spent`: counts the seconds in which the loop starts no step
    """

    callbacks: Callbacks
    report: Callable[[str], None]
    progress: Progress
    spent: PhaseTimer = field(default_factory=PhaseTimer)


class TooManySkipped(UserError):
    """The last `max_skipped` steps were all skipped."""


class StepLog:
    """Sends the metrics of each logged step to the trackers.

    - `done`: the last step whose report was read
    - `skipped`: the number of skipped steps among them, of the replica that skipped most
    """

    def __init__(self, setup: Setup, observers: Observers, traffic: Traffic, consumed: DataPosition):
        self._setup, self._observers, self._traffic, self._consumed = setup, observers, traffic, consumed
        self._devices = setup.layout.mesh.local_devices
        self._pending: deque[tuple[int, StepReport, Mapping[str, float]]] = deque()
        self._peak = peak_tokens_per_second(setup)
        self.done = traffic.first_step
        self.skipped = 0
        self._outer: PseudoGradientStats | None = None  # the newest one since the last logged step
        everywhere = NamedSharding(setup.layout.mesh, PartitionSpec())
        # A process sees only its own replicas' metrics; with several processes, every process gets all metrics.
        self._shared = jax.jit(lambda report: report, out_shardings=everywhere) if jax.process_count() > 1 else None
        self.restart()

    def restart(self) -> None:
        """Restart the measurement of the step rate, which excludes time outside steps."""
        self._rate = Rate(time.monotonic())

    def enqueue(self, step: int, report: StepReport, inspected: Mapping[str, float]) -> None:
        """Queue the report of a started step; log inspected steps always."""
        self._pending.append((step, self._shared(report) if self._shared else report, inspected))
        while len(self._pending) > STEPS_AHEAD:
            self._log(*self._pending.popleft())

    def flush(self) -> None:
        """Read and log the reports of all started steps."""
        while self._pending:
            self._log(*self._pending.popleft())

    def _log(self, step: int, report: StepReport, inspected: Mapping[str, float]) -> None:
        config = self._setup.config
        with self._observers.progress.waiting():
            report = jax.device_get(report)
        self._rate.completed(config.batch.tokens, time.monotonic())
        self.done = step
        self._outer = report.metrics.outer or self._outer
        self.skipped, in_a_row = int(np.max(report.skipped)), int(np.max(report.skipped_in_a_row))
        spikes = 0 if report.spikes is None else int(np.max(report.spikes))
        left_out = self.skipped if report.spikes is None else int(np.max(report.skipped + report.spikes))
        changed_nothing = bool(in_a_row or np.any(report.metrics.spike))
        check_finite(step, report, config.max_skipped)
        if step % config.log_every and step != config.steps and not inspected:
            return
        values = {
            **measured(report),
            **(measured_between(self._outer) if self._outer else {}),
            "learning_rate": self._setup.learning_rate(step - left_out + changed_nothing),
            "tokens": self._consumed.tokens(step),
            "tokens_per_second": self._rate.tokens_per_second,
            **({"mfu": self._rate.tokens_per_second / self._peak} if self._peak else {}),
            "step_seconds": self._rate.step_seconds,
            **self._observers.spent.figures(),
            **memory_in_use(self._devices),
            **self._traffic.figures(step),
            **inspected,
        }
        self._outer = None
        counts = {"skipped": self.skipped, "spikes": spikes}
        self._observers.callbacks.on_step(step, values | {name: count for name, count in counts.items() if count})


def measured(report: StepReport) -> dict[str, float]:
    """Return losses and gradient norm over all replicas, and the callbacks' metrics as means over replicas.

    For separate replicas also each loss and their spread.
    """
    metrics = report.metrics
    losses, weights, norms = (np.atleast_1d(x).astype(np.float64) for x in metrics[:3])
    total = weights.sum() or 1  # a batch without targets has the loss 0
    loss = np.sum(losses * weights, where=weights > 0) / total
    values = {"loss": float(loss), "grad_norm": float(norms.mean())}
    if losses.size > 1:
        values["loss_spread"] = float(losses.max() - losses.min())
        values |= {f"loss_{replica}": float(loss) for replica, loss in enumerate(losses)}
    values |= {name: float((np.atleast_1d(each) * weights).sum() / total) for name, each in metrics.named.items()}
    return values | {name: float(np.mean(value)) for name, value in metrics.callbacks.items()}


def measured_between(outer: PseudoGradientStats) -> dict[str, float]:
    """Return the norm of a pseudo-gradient, and the replicas' cosine similarity if at least two contributed."""
    values = {"outer_grad_norm": float(outer.norm)}
    similarity = cosine(outer)
    return values if similarity is None else {**values, "outer_grad_cosine": similarity}


def check_finite(step: int, report: StepReport, max_skipped: int) -> None:
    """Raise `TooManySkipped` if a replica skipped all of the last `max_skipped` steps."""
    in_a_row = int(np.max(report.skipped_in_a_row))
    if in_a_row >= max_skipped:
        raise TooManySkipped(
            f"max_skipped: loss or gradient was not finite in the last {in_a_row} steps (step {step}: loss "
            f"{report.metrics.loss}, gradient norm {report.metrics.grad_norm})."
        )


def peak_tokens_per_second(setup: Setup) -> float | None:
    """Return tokens per second if all devices computed only the model's products, at their peak in bfloat16.

    `tokens_per_second / peak_tokens_per_second` is the model FLOPs utilisation. None on CPU devices and unknown chips.
    """
    mesh = setup.layout.mesh
    chip = of_device(mesh.devices.flat[0].device_kind)
    if chip is None:
        return None
    return mesh.size * chip.flops_per_second / chip.devices / model_flops(setup).visible


def memory_in_use(devices: Sequence[Any]) -> dict[str, int]:
    """Return `host_memory_bytes`, and the maximum over devices of `device_memory_bytes` and `device_memory_peak_bytes`.

    Devices without memory statistics (CPU) have no entry. The function does not wait for the devices.

    - `devices`: devices of this process
    """
    counted = [stats for device in devices if (stats := device.memory_stats())]
    figures = {"device_memory_bytes": "bytes_in_use", "device_memory_peak_bytes": "peak_bytes_in_use"}
    maxima = {name: max(stats.get(key, 0) for stats in counted) for name, key in figures.items() if counted}
    resident = int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"host_memory_bytes": resident, **maxima}


Tree = Any
LOGITS, LOAD = "attention_logit_max", "expert_load"


class Inspection(Callback):
    """Adds the metrics of each layer to every `inspect.every`-th step."""

    seconds: ClassVar[str] = "inspection_seconds"

    def __init__(self, setup: Setup, progress: Progress):
        self._setup, self._progress = setup, progress
        self._inspectors: dict[str, Inspector] = {}

    def waits_before(self, step: int) -> bool:
        return is_due(step, self._setup.config.inspect.every)

    def before_step(self, pause: StepContext) -> Metrics:
        inspector = self._inspectors.get(pause.method.name)
        if inspector is None:
            self._progress.at(pause.step, Phase.COMPILING)
            inspector = self._inspectors[pause.method.name] = Inspector(self._setup, pause.method)
        with self._progress.waiting():
            return inspector(pause.state, pause.batch)


def is_due(step: int, every: int | None) -> bool:
    """Return whether a step is one of every so many."""
    return every is not None and step % every == 0


class Inspector:
    """Inspects the steps of a method; compiled once."""

    def __init__(self, setup: Setup, method: Method):
        self._by_array = setup.config.inspect.granularity == "array"
        rules = rules_of(setup) if self._by_array else {}
        self._rates = {f"peak_rate/{name}": rule.rate for name, rule in rules.items()}
        probe = _probe(setup, method)
        self._inspected = jax.jit(
            lambda frozen, state, batch: method.holding(frozen).inspected(state, batch, probe),
            out_shardings=setup.layout.sharding((), {}),
            compiler_options=setup.compiler_options,
        )

    def __call__(self, state: TrainState, batch: Tree) -> dict[str, float]:
        """Return the metrics of the step that takes this batch; wait for the devices."""
        found = figures(jax.device_get(self._inspected(state.frozen, state.method, batch)), self._by_array)
        return found | self._rates


def _probe(setup: Setup, method: Method) -> Probe:
    """Return the probe of the maximum attention logits and the loads of experts, for models that have them."""
    execution = setup.evaluation_execution(method.step_layout)

    def probe(model, batch: Tree) -> Tree:
        own, found = ModelMethods.of(model), {}
        if own.attention_logit_maxima is not None:
            found["logits"] = own.attention_logit_maxima(batch, execution)
        if own.expert_loads is not None and (loads := own.expert_loads()) is not None:
            found["loads"] = loads
        return found

    return probe


def figures(found: Inspected, by_array: bool) -> dict[str, float]:
    """Return the metrics by name: `parameter_norm/layer.3`, `grad_norm/layer.3`, `update_ratio/layer.3` and so on.

    A name without a layer is the value of all layers; there is no `grad_norm`, because each step reports it. If
    replicas train separately, norms, ratios and loads are the mean over replicas and logits the maximum.

    - `found`: as NumPy arrays
    - `by_array`: metrics of each array, `layer.3.attention.query.weight`, in place of each layer
    """
    parameters, gradients, updates = (_added(tree, by_array) for tree in found[:3])
    metrics: dict[str, float] = {}
    for name, norms in {"parameter_norm": parameters, "grad_norm": gradients}.items():
        metrics |= {f"{name}/{part}" if part else name: _mean(np.sqrt(square)) for part, square in norms.items()}
    del metrics["grad_norm"]
    for part, square in updates.items():
        with np.errstate(divide="ignore", invalid="ignore"):
            metrics[f"update_ratio/{part}" if part else "update_ratio"] = _mean(np.sqrt(square / parameters[part]))
    if "logits" in found.probed:
        logits = found.probed["logits"].array
        metrics |= _by_layer(LOGITS, np.max(logits.reshape(-1, logits.shape[-1]), axis=0), np.max)
    if "loads" in found.probed:
        loads = found.probed["loads"].array
        metrics |= load_figures(np.mean(loads.reshape(-1, *loads.shape[-2:]), axis=0))
    return metrics


def load_figures(loads: np.ndarray) -> dict[str, float]:
    """Return the largest and the smallest load of an expert, and the entropy of the loads over that of equal ones.

    - `loads`: [layers, experts], over the mean of a layer; NaN for layers without experts
    """
    shares = loads / loads.shape[-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.sum(np.where(shares > 0, shares * np.log(shares), shares), axis=-1) / np.log(loads.shape[-1])
    return {
        **_by_layer(f"{LOAD}_max", np.max(loads, axis=-1), np.nanmax),
        **_by_layer(f"{LOAD}_min", np.min(loads, axis=-1), np.nanmin),
        **_by_layer(f"{LOAD}_entropy", entropy, np.nanmin),
    }


def _by_layer(name: str, values: np.ndarray, of_all: Callable[[np.ndarray], Any]) -> dict[str, float]:
    """Return the metrics of layers [layers], without those that are NaN, and that of all."""
    found = {f"{name}/layer.{layer}": _float(value) for layer, value in enumerate(values) if not np.isnan(value)}
    return {name: _float(of_all(values)), **found}


def _added(tree: Tree, by_array: bool) -> dict[str, np.ndarray]:
    """Return sums of squares by layer or array name, each a scalar or [replica]; the total has the name ""."""
    sums: dict[str, np.ndarray] = {}
    parts = [part for leaf, names in names_of_arrays(tree) for part in _parts(leaf, names, by_array)]
    for name, square in (*parts, *(("", square) for _, square in parts)):
        sums[name] = sums.get(name, 0.0) + square
    return sums


def _parts(leaf: NamedArray, names: list[str], by_array: bool) -> list[tuple[str, np.ndarray]]:
    """Return the sums of squares of an array, one for each layer of a stack."""
    values, in_layers = np.asarray(leaf.array, np.float64), layers_axis(leaf) is not None
    if not by_array:
        names = [".".join(name.split(".")[: 1 + in_layers]) for name in names]
    return [(name, values[..., row] if in_layers else values) for row, name in enumerate(names)]


def _mean(values: np.ndarray) -> float:
    return _float(np.mean(values))


def _float(value: Any) -> float:
    """Return the value; NaN for an infinite value, such as a ratio to zero."""
    return float(value) if math.isfinite(value) else math.nan


class QuantisationFigures:
    """Measures the quantisation loss of the configured method's reduce-scatter; compiled once.

    - `held_out`: the gradients are those of its first batch
    """

    def __init__(self, setup: Setup, held_out: Examples):
        self._setup, self._held_out = setup, held_out
        method = setup.method
        self._lost = jax.jit(
            lambda frozen, state, batch: method.holding(frozen).quantisation_loss(state, batch),
            out_shardings=setup.layout.sharding((), {}),
            compiler_options=setup.compiler_options,
        )

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Return `quantisation_error`, relative to the values, `energy_sent`, 1 - its square, and `feedback_norm`."""
        with closing(GlobalBatches(self._held_out, self._setup.batch_axes, self._setup.layout)) as batches:
            batch = {key: array for key, array in next(iter(batches)).items() if key != MORE_BYTES}
            lost = self._lost(state.frozen, state.method, batch)
        error = float(lost.relative_error)
        return {"quantisation_error": error, "energy_sent": 1 - error**2, "feedback_norm": float(lost.error_norm)}
