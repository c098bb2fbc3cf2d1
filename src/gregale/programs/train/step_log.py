"""The figures of steps, read from the device a few steps late so that the loop never waits for a loss."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gregale.audit.chips import of_device
from gregale.audit.roofline import model_flops_per_token
from gregale.errors import UserError
from gregale.methods.agreement import PseudoGradient, cosine
from gregale.model.config import LlamaConfig
from gregale.programs.plan.shapes import step_shape
from gregale.programs.runtime.setup import Setup
from gregale.programs.train.counts import DataPosition, PhaseTimer, Traffic
from gregale.programs.train.observers import Observers
from gregale.tracking import Rate
from gregale.training.state import StepReport

# Steps handed to the device before the oldest one's loss is read: with one there is always a step waiting, and more
# would let simulated CPU devices of several steps wait for one another for want of threads.
STEPS_AHEAD = 1


class TooManySkipped(UserError):
    """The last `max_skipped` steps were all skipped."""


class StepLog:
    """Hands the figures of every logged step to the trackers.

    - `done`: the last step that was read
    - `skipped`: of the steps that were read, how many were skipped, by the replica that skipped most
    """

    def __init__(self, setup: Setup, observers: Observers, traffic: Traffic, consumed: DataPosition, spent: PhaseTimer):
        self._setup, self._observers, self._traffic, self._consumed = setup, observers, traffic, consumed
        self._spent, self._devices = spent, setup.layout.mesh.local_devices
        self._pending: deque[tuple[int, StepReport, Mapping[str, float]]] = deque()
        self._peak = peak_tokens_per_second(setup)
        self.done = traffic.first_step
        self.skipped = 0
        self._outer: PseudoGradient | None = None  # the last one since the last line, which may have been before now
        everywhere = NamedSharding(setup.layout.mesh, PartitionSpec())
        # A process sees its own replicas' figures only; where there are others, all are brought everywhere.
        self._shared = jax.jit(lambda report: report, out_shardings=everywhere) if jax.process_count() > 1 else None
        self.restart()

    def restart(self) -> None:
        """Begins to measure anew, so that time spent on other things does not count."""
        self._rate = Rate(time.monotonic(), self.done)

    def took(self, step: int, report: StepReport, inspected: Mapping[str, float]) -> None:
        """Takes the report of a step that was handed to the device; one that was inspected is logged in any case."""
        self._pending.append((step, self._shared(report) if self._shared else report, inspected))
        while len(self._pending) > STEPS_AHEAD:
            self._log(*self._pending.popleft())

    def catch_up(self) -> None:
        """Waits for all steps so far."""
        while self._pending:
            self._log(*self._pending.popleft())

    def _log(self, step: int, report: StepReport, inspected: Mapping[str, float]) -> None:
        config = self._setup.config
        with self._observers.progress.waiting():
            report = jax.device_get(report)
        self._rate.completed(step, config.batch.tokens, time.monotonic())
        self.done = step
        self._outer = report.metrics.outer or self._outer
        self.skipped, in_a_row = int(np.max(report.skipped)), int(np.max(report.skipped_in_a_row))
        check_finite(step, report, config.max_skipped)
        if step % config.log_every and step != config.steps and not inspected:
            return
        values = {
            **measured(report),
            **(measured_between(self._outer) if self._outer else {}),
            "learning_rate": self._setup.learning_rate(step - self.skipped + bool(in_a_row)),
            "tokens": self._consumed.tokens(step),
            "tokens_per_second": self._rate.tokens_per_second,
            **({"mfu": self._rate.tokens_per_second / self._peak} if self._peak else {}),
            "step_seconds": self._rate.step_seconds,
            **self._spent.figures(),
            **memory_in_use(self._devices),
            **self._traffic.figures(step),
            **inspected,
        }
        self._outer = None
        self._observers.trackers.log(step, values | ({"skipped": self.skipped} if self.skipped else {}))


def measured(report: StepReport) -> dict[str, float]:
    """Loss and gradient norm over all replicas and, where replicas train apart, those of each and their spread."""
    metrics = report.metrics
    losses, weights, norms = (np.atleast_1d(x).astype(np.float64) for x in metrics[:3])
    total = weights.sum()
    values = {"loss": float((losses * weights).sum() / total if total else np.nan), "grad_norm": float(norms.mean())}
    if losses.size > 1:
        values["loss_spread"] = float(losses.max() - losses.min())
        values |= {f"loss_{replica}": float(loss) for replica, loss in enumerate(losses)}
    return values


def measured_between(outer: PseudoGradient) -> dict[str, float]:
    """Norm of a pseudo-gradient, and the replicas' cosine similarity if at least two had a share in it."""
    values = {"outer_grad_norm": float(outer.norm)}
    similarity = cosine(outer)
    return values if similarity is None else {**values, "outer_grad_cosine": similarity}


def check_finite(step: int, report: StepReport, most: int) -> None:
    """Raises `TooManySkipped` if the last `most` steps were all skipped, of any replica."""
    in_a_row = int(np.max(report.skipped_in_a_row))
    if in_a_row >= most:
        raise TooManySkipped(
            f"max_skipped: loss or gradient was not finite in the last {in_a_row} steps (step {step}: loss "
            f"{report.metrics.loss}, gradient norm {report.metrics.grad_norm})."
        )


def peak_tokens_per_second(setup: Setup) -> float | None:
    """Tokens a second if all devices did nothing but the model's products, at their peak in bfloat16.

    So `tokens_per_second / peak_tokens_per_second` is the utilisation. None on CPU devices and unknown chips, and for
    models without a closed form.
    """
    mesh = setup.layout.mesh
    chip = of_device(mesh.devices.flat[0].device_kind)
    if chip is None or not isinstance(setup.config.model, LlamaConfig):
        return None
    return mesh.size * chip.flops_per_second / chip.devices / model_flops_per_token(step_shape(setup))


def memory_in_use(devices: Sequence[Any]) -> dict[str, int]:
    """`host_memory_bytes`, and of the device that has most `device_memory_bytes` and `device_memory_peak_bytes`.

    Devices that count nothing (CPU) have none. Nothing is waited for.

    - `devices`: of this process
    """
    counted = [stats for device in devices if (stats := device.memory_stats())]
    figures = {"device_memory_bytes": "bytes_in_use", "device_memory_peak_bytes": "peak_bytes_in_use"}
    most = {name: max(stats.get(key, 0) for stats in counted) for name, key in figures.items() if counted}
    return {"host_memory_bytes": _resident(), **most}


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
