"""The step that `train` would run, compiled from shapes alone, and what is read off it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.audit import Audit, Collective, audit
from gregale.audit.memory import CompilerMemory, Estimate, bytes_on_device, compiler_memory, estimate_memory
from gregale.audit.overlap import compute_behind
from gregale.audit.placement import BETWEEN, INSIDE
from gregale.audit.roofline import Roofline, Work, roofline, work_of
from gregale.audit.step import ACCELERATOR, Backend, StepShape
from gregale.audit.traffic import expected_transfers, sent_bytes
from gregale.axes.layout import REPLICA, is_named
from gregale.axes.mesh import make_mesh
from gregale.methods.config import DilocoConfig
from gregale.model.config import DTYPES, LlamaConfig
from gregale.model.execution import execution
from gregale.programs.plan_devices import Target, for_accelerators
from gregale.programs.setup import Setup, set_up
from gregale.services.config import TrainConfig

INTEGERS = ("tokens", "targets", "segment_ids", "positions")
FAR_AXES = ("island", REPLICA)


def abstract_batch(setup: Setup) -> dict[str, NamedArray]:
    """A step's batch as `jax.ShapeDtypeStruct`s [batch, position], sharded as `train` places it."""
    axes = setup.batch_axes
    sharding = setup.layout.sharding(axes, setup.layout.compute)
    shape, names = tuple(axis.size for axis in axes), tuple(axis.name for axis in axes)

    def one(dtype) -> NamedArray:
        array: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        return NamedArray(array, names)

    return {**{name: one(jnp.int32) for name in INTEGERS}, "loss_mask": one(jnp.float32)}


def compile_step(setup: Setup) -> jax.stages.Compiled:
    """The program of step 1; nothing is allocated."""
    during = setup.method.actions(1).during
    with hax.axis_mapping({}):
        return setup.stepper().program.lower(setup.abstract_state(), abstract_batch(setup), *during).compile()


def step_shape(setup: Setup) -> StepShape:
    """The sizes that the closed forms take."""
    config = setup.config
    model, batch, compute = config.model, config.batch, config.compute
    assert isinstance(model, LlamaConfig)
    return StepShape(
        layout=setup.layout,
        weights=[leaf for leaf in jax.tree.leaves(setup.model, is_leaf=is_named) if is_named(leaf)],
        rows=batch.size,
        positions=batch.sequence_length,
        microbatches=batch.microbatches,
        layers=model.layers,
        heads=model.heads,
        head_size=model.HeadSize.size,
        compute_bytes=jnp.dtype(DTYPES[compute.dtype]).itemsize,
        remat=compute.remat,
        per_step=compute.gather == "per_step",
        loss_block=compute.loss_block,
        unrolled=execution(compute, setup.layout).unroll >= model.layers,
    )


@dataclass(frozen=True)
class Bytes:
    """Bytes of a run's trees on one device, exactly, from their shardings."""

    parameters: int
    optimizer: int
    gradients: int
    batch: int

    @property
    def arguments(self) -> int:
        return self.parameters + self.optimizer + self.batch


def tree_bytes(setup: Setup) -> Bytes:
    weights = step_shape(setup).weights
    parameters = bytes_on_device(setup.layout.abstract(weights, setup.layout.params))
    return Bytes(
        parameters=parameters,
        optimizer=bytes_on_device(setup.abstract_state()) - parameters,
        gradients=parameters,  # both are float32, under `params`
        batch=bytes_on_device(abstract_batch(setup)),
    )


def estimate(setup: Setup, backend: Backend) -> Estimate:
    """The step's memory in closed form."""
    return estimate_memory(step_shape(setup), tree_bytes(setup).arguments, backend)


def estimated_link_bytes(setup: Setup) -> dict[str, float]:
    """What a device of an accelerator sends over each link in a step, in closed form: `replica` is the slow link.

    DiLoCo sends over it once in a period what PSDP sends in every step; that is spread over the period's steps.
    """
    step, sync = step_shape(setup), setup.config.sync
    sent = {INSIDE: 0.0, BETWEEN: 0.0}
    for transfer in expected_transfers(step, ACCELERATOR):
        sent[BETWEEN if set(transfer.axes) & set(FAR_AXES) else INSIDE] += sent_bytes(transfer, step.mesh)
    if isinstance(sync, DilocoConfig):
        sent[BETWEEN] /= sync.period
    return sent


def estimated_work(setup: Setup, link_bytes: dict[str, float]) -> Work:
    return work_of(step_shape(setup), tree_bytes(setup).optimizer, link_bytes)


@dataclass(frozen=True)
class Plan:
    """Everything that the compiled step tells."""

    setup: Setup
    target: Target
    text: str
    audit: Audit
    memory: CompilerMemory
    compiler_flops: float
    behind: dict[str, int]

    @property
    def link_bytes(self) -> dict[str, float]:
        """What a device sends over each link in a step.

        From the compiled program; but XLA:CPU sends bfloat16 as float32, so for simulated devices by the closed form,
        and so for DiLoCo, which does not synchronise in the step that is compiled.
        """
        if self.target.simulated or isinstance(self.setup.config.sync, DilocoConfig):
            return estimated_link_bytes(self.setup)
        sent = {INSIDE: 0.0, BETWEEN: 0.0}
        for collective in self.audit.collectives:
            sent[collective.link] += collective.bytes_sent * (collective.times or 1)
        return sent

    def roofline(self, between_bytes_per_second: float | None) -> Roofline:
        work = estimated_work(self.setup, self.link_bytes)
        return roofline(work, self.target.chip, self.target.devices_a_chip, between_bytes_per_second)

    def hidden(self, collective: Collective) -> bool:
        """Whether compute runs while the collective is on its way."""
        return self.behind.get(collective.name, 0) > 0


def plan_step(config: TrainConfig, tokens: int, target: Target) -> Plan:
    """Compiles the step of a configuration for the target and reads it.

    Raises:
        UserError: the configuration does not fit the devices.
    """
    config = for_accelerators(config, target)
    setup = set_up(config, tokens, make_mesh(config.mesh, target.devices))
    compiled = compile_step(setup)
    text = compiled.as_text() or ""
    found = audit(text, setup.layout.mesh, {"microbatches": config.batch.microbatches})
    if target.simulated:
        found = Audit(tuple(_with_link(collective) for collective in found.collectives))
    costs = compiled.cost_analysis() or {}
    return Plan(
        setup=setup,
        target=target,
        text=text,
        audit=found,
        memory=compiler_memory(compiled),
        compiler_flops=float(costs.get("flops", 0.0)),
        behind=compute_behind(text),
    )


def _with_link(collective: Collective) -> Collective:
    """Simulated devices have no slices: what crosses replicas is taken to cross the slow link."""
    return replace(collective, link=BETWEEN if set(collective.touched) & set(FAR_AXES) else INSIDE)


def devices_of_a_replica(setup: Setup) -> int:
    """Devices that share one replica's end of the slow link."""
    sizes = setup.layout.mesh.shape
    return prod(size for axis, size in sizes.items() if axis not in FAR_AXES)
