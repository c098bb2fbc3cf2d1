"""Provides metrics of each layer: norms of parameters and gradients, ratios of updates, attention logits, expert loads.

A separate program repeats the computation of the next step without a change of the state, so that inspection does not
change the step's program. The error of quantised averages also has a separate program.

    inspector = Inspector(setup, method)
    metrics = inspector(state, batch)  # before the step that takes this batch
"""

import math
from collections.abc import Callable
from contextlib import closing
from typing import Any, ClassVar

import jax
import numpy as np
from haliax import NamedArray

from gregale.axes.parameters import layers_axis, names_of_arrays
from gregale.data.examples import MORE_BYTES, Examples
from gregale.distributed.liveness import Phase, Progress
from gregale.methods.method import Inspected, Method, Probe
from gregale.model.config import ModelMethods
from gregale.programs.runtime.batches import GlobalBatches
from gregale.programs.runtime.parameter_groups import rules_of
from gregale.programs.runtime.setup import Setup
from gregale.tracking.callback import Callback, Metrics, Pause
from gregale.training.state import TrainState

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

    def before_step(self, pause: Pause) -> Metrics:
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
        """Return `quantisation_error`, relative to the values, and `feedback_norm`, the norm of the kept error."""
        with closing(GlobalBatches(self._held_out, self._setup.batch_axes, self._setup.layout)) as batches:
            batch = {key: array for key, array in next(iter(batches)).items() if key != MORE_BYTES}
            lost = self._lost(state.frozen, state.method, batch)
        return {"quantisation_error": float(lost.relative_error), "feedback_norm": float(lost.error_norm)}
