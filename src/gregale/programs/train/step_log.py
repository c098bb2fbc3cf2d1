"""Provides the log of step metrics and its counts; it reads losses a few steps late so that the loop waits for none."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gregale.audit.chips import of_device
from gregale.audit.roofline import model_flops_per_token
from gregale.data.mixtures import Mixtures, tokens_of
from gregale.distributed.liveness import Progress
from gregale.errors import UserError
from gregale.methods.method import PseudoGradient, cosine
from gregale.programs.plan.estimates import has_closed_forms, step_shape
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import BatchConfig
from gregale.tracking.callback import Callbacks
from gregale.training.state import StepReport

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
    mixtures: Mixtures

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
        self._outer: PseudoGradient | None = None  # the newest one since the last logged step
        everywhere = NamedSharding(setup.layout.mesh, PartitionSpec())
        # A process sees only its own replicas' metrics; with several processes, every process gets all metrics.
        self._shared = jax.jit(lambda report: report, out_shardings=everywhere) if jax.process_count() > 1 else None
        self.restart()

    def restart(self) -> None:
        """Restart the measurement of the step rate, which excludes time outside steps."""
        self._rate = Rate(time.monotonic())

    def took(self, step: int, report: StepReport, inspected: Mapping[str, float]) -> None:
        """Queue the report of a started step; log inspected steps always."""
        self._pending.append((step, self._shared(report) if self._shared else report, inspected))
        while len(self._pending) > STEPS_AHEAD:
            self._log(*self._pending.popleft())

    def catch_up(self) -> None:
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


def measured_between(outer: PseudoGradient) -> dict[str, float]:
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

    `tokens_per_second / peak_tokens_per_second` is the model FLOPs utilisation. None on CPU devices and unknown chips,
    and for models without a closed form of their FLOPs.
    """
    mesh = setup.layout.mesh
    chip = of_device(mesh.devices.flat[0].device_kind)
    if chip is None or not has_closed_forms(setup):
        return None
    return mesh.size * chip.flops_per_second / chip.devices / model_flops_per_token(step_shape(setup))


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
