"""Provides the closed forms of a run's step from shapes alone: sizes, memory, work, traffic, and time.

Times compare settings of one model on the same devices: transfers count on the links that their mesh axes have. They do
not predict, because products run at the chip's peak. The traffic of a plugin's optimizer is that of its compiled
update.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from gregale.axes.layout import MODEL, REPLICA, is_named, named_arrays
from gregale.axes.parameters import is_buffer, is_quantised, trainable
from gregale.cost import Collective, audit
from gregale.cost.collectives import BETWEEN, INSIDE, Grid, grid_of
from gregale.cost.estimate import (
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
from gregale.cost.roofline import Roofline, Work, link_rates, roofline, work_of
from gregale.cost.traffic import Transfer, expected_transfers, kept, pipelined, sent_bytes
from gregale.errors import UserError
from gregale.methods.method import Method
from gregale.model.config import DTYPES
from gregale.model.execution import execution
from gregale.programs.plan.devices import Target
from gregale.programs.runtime.setup import Setup
from gregale.runs.rules import lacking
from gregale.training.compiler import compiler_options, sums_behind

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
    drops = setup.config.adapter.dropout > 0
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


# Transfers of which the compilers' default options start most beside products (docs/tpu.md, docs/gpu.md).
BEHIND_PRODUCTS = ("weights", "gradients")


def closed_form_seconds(setup: Setup, target: Target, bandwidth: float | None, trees: Bytes | None = None) -> float:
    """Return the seconds of a step: weights and gradients inside a slice travel behind products, all else in between.

    - `bandwidth`: bytes per second that a device sends between slices; None: the chip's share of its network
    - `trees`: the sizes of the setup's trees, if they are known
    """
    work = estimated_work(setup, estimated_link_bytes(setup) or {INSIDE: 0.0, BETWEEN: 0.0}, trees)
    bound = roofline(work, target.chip, target.devices_a_chip, bandwidth)
    rate, grid = link_rates(target.chip, target.devices_a_chip, bandwidth)[INSIDE], link_grid(setup, target)
    loads: Counter[tuple[bool, str, tuple[str, ...]]] = Counter()
    for each in step_transfers(setup, ACCELERATOR):
        if not set(each.axes) & set(FAR_AXES):
            behind = each.purpose in BEHIND_PRODUCTS and "model" not in each.axes
            loads[behind, each.kind, each.axes] += each.bytes * each.times
    parts = dict.fromkeys((True, False), 0.0)
    for (behind, kind, axes), size in loads.items():
        parts[behind] += _transfer_seconds(Transfer("", kind, axes, size), setup, grid, rate)
    return joined(bound, parts[True], parts[False] + bound.host)


def joined(bound: Roofline, behind: float, between: float) -> float:
    """Return the time of a step whose transfers inside a slice go behind products, and between them."""
    far = sum(bound.links.values()) - bound.links[INSIDE]
    return max(bound.compute, bound.memory, behind) + between + far


def link_grid(setup: Setup, target: Target) -> Grid | None:
    return None if target.simulated else grid_of(setup.layout.mesh, target.chip, target.devices_a_chip)


def _transfer_seconds(each: Transfer, setup: Setup, grid: Grid | None, rate: float) -> float:
    """Return the seconds of a transfer inside a slice."""
    sizes = dict(setup.layout.mesh.shape)
    sent = sent_bytes(each, sizes)
    if grid is None:
        return sent / rate
    numbers = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
    group = numbers[tuple(slice(None) if axis in each.axes else 0 for axis in sizes)].ravel().tolist()
    groups = tuple(pairwise(group)) if each.kind == "collective-permute" else (tuple(group),)
    found = grid.seconds_of(each.kind, each.bytes, sent, groups)
    return sent / rate if found is None else found


def optimizer_note(setup: Setup) -> str | None:
    """Return a note if the optimizer of a plugin sends over the slow axes, with its bytes; None if it does not.

    `Method.bytes_sent` counts gradients and updates, so that it leaves these bytes out.
    """
    config = setup.config.optimizer
    if type(config).__module__.partition(".")[0] == "gregale":
        return None
    found = optimizer_collectives(setup)
    if not found:
        return None
    axes = ", ".join(dict.fromkeys(f"`{axis}`" for each in found for axis in each.touched if axis in FAR_AXES))
    sent = sum(each.bytes_sent * each.counted for each in found)
    return (
        f"optimizer.type is {config.get_choice_name(type(config))}, whose update reduces over shards: a device sends "
        f"{sent:,.0f} bytes a step for it over {axes}, in addition to the {setup.method.bytes_sent(1):,} bytes of "
        "gradients and updates. `bytes_sent` and `replica_bytes` leave them out."
    )


def optimizer_collectives(setup: Setup) -> list[Collective]:
    """Return the collectives over the slow axes in the compiled update of the optimizer, without gathers of updates."""
    layout = setup.method.step_layout
    optimizer = setup.config.build_optimizer(setup.model, layout).sharded
    weights = layout.abstract(trainable(setup.model), layout.opt_state)
    state = layout.abstract(jax.eval_shape(optimizer.init, weights), layout.opt_state)

    def update(grads, state, weights, norm):
        return layout.constrain(optimizer.update(grads, state, weights, gradient_norm=norm), layout.opt_state)

    with hax.axis_mapping({}):
        compiled = jax.jit(update, compiler_options=setup.compiler_options)
        program = compiled.lower(weights, state, weights, jax.ShapeDtypeStruct((), jnp.float32)).compile()
    return [each for each in audit(program, layout.mesh).collectives if set(each.touched) & set(FAR_AXES)]
