"""Provides the closed forms of a run's step: sizes, memory, work and traffic, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.audit.collectives import BETWEEN, INSIDE
from gregale.audit.estimate import (
    ACCELERATOR,
    Backend,
    Estimate,
    ParameterShape,
    PipelineShape,
    StepShape,
    bytes_on_device,
    estimate_memory,
    estimate_pipeline,
)
from gregale.audit.roofline import Work, work_of
from gregale.audit.traffic import Transfer, expected_transfers, kept, pipelined, sent_bytes
from gregale.axes.layout import MODEL, REPLICA, is_named, named_arrays
from gregale.axes.parameters import is_buffer, is_quantised, trainable
from gregale.errors import UserError
from gregale.methods.method import Method
from gregale.model.config import DTYPES
from gregale.model.execution import execution
from gregale.runs.rules import lacking
from gregale.training.compiler import compiler_options, sums_behind

if TYPE_CHECKING:
    from gregale.programs.runtime.setup import Setup

INTEGERS = ("tokens", "targets", "segment_ids", "positions")
FAR_AXES = ("island", REPLICA)
TREES = ("parameters", "optimizer", "outer_parameters", "outer_optimizer")


def abstract_batch(setup: Setup) -> dict[str, NamedArray]:
    """Return a step's batch as `jax.ShapeDtypeStruct`s [batch, position] with the shardings of `train`."""
    axes = setup.batch_axes
    sharding = setup.layout.sharding(axes, setup.layout.compute)
    shape, names = tuple(axis.size for axis in axes), tuple(axis.name for axis in axes)

    def one(dtype) -> NamedArray:
        array: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        return NamedArray(array, names)

    return {**{name: one(jnp.int32) for name in INTEGERS}, "loss_mask": one(jnp.float32)}


def parameter_shape(setup: Setup, method: Method | None = None) -> ParameterShape:
    """Return the sizes of parameters and batch in a step of the configured or another method; any model has them."""
    config, method = setup.config, method or setup.method
    return ParameterShape(
        layout=method.step_layout,
        weights=named_arrays(trainable(setup.model)),
        rows=config.batch.size,
        positions=config.batch.sequence_length,
        microbatches=config.batch.microbatches,
        compute_bytes=jnp.dtype(DTYPES[config.compute.dtype]).itemsize,
    )


def has_closed_forms(setup: Setup) -> bool:
    """Return whether there are closed forms of the model's memory, time and traffic inside a replica."""
    return lacking(setup.config) is None


def frozen_shapes(setup: Setup) -> dict[str, Any]:
    """Return the fields of a `StepShape` for weights that nothing trains: those beside adapters, or a copy."""
    if setup.config.adapter is None:
        return {"reference": jax.tree.leaves(setup.frozen, is_leaf=is_named)}

    def parameters(model):
        leaves = jax.tree.leaves(model, is_leaf=lambda leaf: is_named(leaf) or is_quantised(leaf) or is_buffer(leaf))
        return [leaf for leaf in leaves if not is_buffer(leaf)]

    leaves, stored = parameters(setup.base), parameters(setup.stored_base)
    parts: dict[bool, list] = {True: [], False: []}
    for leaf, form in zip(leaves, stored, strict=True):
        parts[is_quantised(form)].append(leaf)
    blocks = next((form.codec.format for form in stored if is_quantised(form)), None)
    reference = parts[False] + parts[True] if setup.config.objective.needs_reference else []
    drops = getattr(setup.config.adapter, "dropout", 0) > 0
    frozen = {"frozen": parts[False], "quantised": parts[True], "blocks": blocks, "reference": reference}
    return {**frozen, "drops": drops}


def step_shape(setup: Setup, method: Method | None = None) -> StepShape:
    """Return the sizes for the closed forms of the configured or another method's step; for DiLoCo of one replica.

    Raises:
        UserError: the model has no closed forms, see `has_closed_forms`.
    """
    config, sizes = setup.config, setup.config.model.closed_form_sizes()
    if sizes is None or (reason := lacking(config)) is not None:
        raise UserError(reason)
    compute = config.compute
    run = execution(compute, setup.layout, config.model)
    options = compiler_options(compute.compiler_options, setup.layout.mesh, config.model.experts is not None)
    pipeline, schedule, shape = config.pipeline, setup.schedule(), None
    if pipeline is not None and schedule is not None:
        shape = PipelineShape(schedule.microbatches, schedule.repeats, schedule.iterations, pipeline.gather)
    return StepShape(
        **vars(parameter_shape(setup, method)),
        **sizes._asdict(),
        **frozen_shapes(setup),
        remat=compute.remat if pipeline is None else pipeline.remat,
        per_step=compute.gather == "per_step",
        loss_block=compute.loss_block,
        unrolled=run.unroll >= sizes.layers,
        scores=run.kernels.attention == "xla",
        rules=run.kernels.rules,
        sums_behind=sums_behind(options or {}),
        splits_stream=shape is None and run.splits(config.batch.sequence_length),
        pipeline=shape,
        matmul=compute.matmul,
        fuses_logits=run.fused_logits and setup.layout.mesh.shape[MODEL] == 1,
    )


@dataclass(frozen=True)
class Bytes:
    """Bytes of a run's trees on one device, exactly, from their shardings.

    - `parameters`, `optimizer`: for DiLoCo the replica's own
    - `frozen`: weights beside adapters, or a copy
    - `outer_parameters`, `outer_optimizer`: of DiLoCo; 0 for PSDP
    - `counters`: all else in the state, such as counts of steps and tokens, and other trees of a method
    - `gradients`: the buffers that sum microbatches
    """

    parameters: int
    frozen: int
    optimizer: int
    outer_parameters: int
    outer_optimizer: int
    counters: int
    gradients: int
    batch: int

    @property
    def state(self) -> int:
        """Return the bytes of the state between steps."""
        outer = self.outer_parameters + self.outer_optimizer
        return self.parameters + self.frozen + self.optimizer + outer + self.counters

    @property
    def arguments(self) -> int:
        return self.state + self.batch


def tree_bytes(setup: Setup) -> Bytes:
    state = setup.abstract_state()
    trees = dict.fromkeys(TREES, 0)
    trees |= {name: bytes_on_device(tree) for name, tree in setup.method.trees(state.method).items() if name in trees}
    frozen = bytes_on_device(state.frozen)
    return Bytes(
        **trees,
        frozen=frozen,
        counters=bytes_on_device(state) - sum(trees.values()) - frozen,
        gradients=bytes_on_device(setup.layout.abstract(trainable(setup.model), setup.layout.params)),
        batch=bytes_on_device(abstract_batch(setup)),
    )


def estimate(setup: Setup, backend: Backend, trees: Bytes | None = None) -> Estimate:
    """Return the memory of a step in closed form. Raises `UserError` as `step_shape`.

    - `trees`: the sizes of the setup's trees, if they are known
    """
    step, arguments = step_shape(setup), (trees or tree_bytes(setup)).arguments
    update = setup.config.optimizer.update_bytes(trainable(setup.model), step.layout)
    if step.pipeline is not None:
        return estimate_pipeline(step, step.pipeline, arguments, backend, update)
    return estimate_memory(step, arguments, backend, update)


def step_transfers(setup: Setup, backend: Backend, method: Method | None = None) -> list[Transfer]:
    """Return all transfers of a step of the configured or another method, except those that join DiLoCo's replicas.

    The list is empty for a model without closed forms.
    """
    if not has_closed_forms(setup):
        return []
    step = step_shape(setup, method)
    traffic = (method or setup.method).traffic(step)
    averages = None if traffic is None else traffic.averages
    stack = None if step.pipeline is None else pipelined(step, step.pipeline, backend)
    own = kept(step, setup.config.optimizer.transfers(trainable(setup.model), step.layout))
    return [*expected_transfers(step, backend, averages, stack), *own]


def estimated_link_bytes(setup: Setup) -> dict[str, float] | None:
    """Return the bytes that an accelerator sends over each link in a step, in closed form: `replica` is the slow link.

    The transfers that join DiLoCo's replicas are spread over the steps of a period. None if the model or the method has
    no closed form.
    """
    step = parameter_shape(setup)
    traffic = setup.method.traffic(step)
    if traffic is None or not has_closed_forms(setup):
        return None
    sent, joins = sent_by_link(step_transfers(setup, ACCELERATOR), step), sent_by_link(traffic.joins(), step)
    return {link: count + joins[link] / traffic.period for link, count in sent.items()}


def sent_by_link(transfers: list[Transfer], step: ParameterShape) -> dict[str, float]:
    """Return the bytes that a device sends inside a slice, and between slices."""
    sent = {INSIDE: 0.0, BETWEEN: 0.0}
    for transfer in transfers:
        sent[BETWEEN if set(transfer.axes) & set(FAR_AXES) else INSIDE] += sent_bytes(transfer, step.mesh)
    return sent


def estimated_work(setup: Setup, link_bytes: dict[str, float], trees: Bytes | None = None) -> Work:
    """Return a device's work in a step, including the optimizer's matrix products; `trees` as for `estimate`."""
    step = step_shape(setup)
    update = setup.config.optimizer.update_flops(trainable(setup.model), step.layout)
    return work_of(step, (trees or tree_bytes(setup)).optimizer, link_bytes, update)


def devices_of_a_replica(setup: Setup) -> int:
    """Return the number of devices of a replica, which share its end of the slow link."""
    sizes = setup.layout.mesh.shape
    return prod(size for axis, size in sizes.items() if axis not in FAR_AXES)
