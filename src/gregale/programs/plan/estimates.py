"""Provides what shapes alone tell of a run's step: bytes of its trees, its parameters' transfers, and notes."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.axes.layout import EXPERTS, ROUTER, SHARED_GATE, Layout, is_layers, is_named, named_arrays
from gregale.axes.parameters import is_buffer, is_quantised, trainable
from gregale.cost import Collective, audit
from gregale.cost.memory import bytes_on_device
from gregale.formatting import listed
from gregale.huggingface.families import parameters_of
from gregale.model.config import DTYPES
from gregale.programs.runtime.setup import Setup

FAR_AXES = ("island", "replica")
TREES = ("parameters", "optimizer", "outer_parameters", "outer_optimizer")


@dataclass(frozen=True)
class Bytes:
    """Bytes of a run's trees on one device, exactly, from their shardings.

    - `parameters`, `optimizer`: for DiLoCo the replica's own
    - `frozen`: weights beside adapters, or a copy
    - `outer_parameters`, `outer_optimizer`: of DiLoCo; 0 for PSDP
    - `average`: that of the parameters
    - `counters`: all else in the state, such as counts of steps and tokens, and other trees of a method
    - `gradients`: the buffers that sum microbatches
    """

    parameters: int
    frozen: int
    optimizer: int
    outer_parameters: int
    outer_optimizer: int
    average: int
    counters: int
    gradients: int
    batch: int

    @property
    def state(self) -> int:
        """Return the bytes of the state between steps."""
        outer = self.outer_parameters + self.outer_optimizer
        return self.parameters + self.frozen + self.optimizer + outer + self.average + self.counters

    @property
    def arguments(self) -> int:
        return self.state + self.batch


def tree_bytes(setup: Setup) -> Bytes:
    state = setup.abstract_state()
    trees = dict.fromkeys(TREES, 0)
    trees |= {name: bytes_on_device(tree) for name, tree in setup.method.trees(state.method).items() if name in trees}
    frozen, average = bytes_on_device(state.frozen), bytes_on_device(state.average)
    return Bytes(
        **trees,
        frozen=frozen,
        average=average,
        counters=bytes_on_device(state) - sum(trees.values()) - frozen - average,
        gradients=bytes_on_device(setup.layout.abstract(trainable(setup.model), setup.layout.params)),
        batch=bytes_on_device(setup.abstract_batch),
    )


def weights_of(tree) -> list[NamedArray]:
    """Return the weights of an abstract model, those in blocks too, without its buffers."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: is_named(leaf) or is_quantised(leaf) or is_buffer(leaf))
    return [leaf for leaf in leaves if is_named(leaf)]


@dataclass(frozen=True)
class ParameterUse:
    """What a device's use of all parameters in a step moves: each is gathered, used, and its gradient summed.

    With `compute.gather` per_step they are gathered once, else in the forward and in the backward pass of each
    microbatch. Transfers that a compiler merges or repeats are left out, and so are those of a pipeline's window.

    - `sent`: bytes that a device sends inside a replica
    - `memory`: bytes that it reads of weights in use and writes of their gradients, beyond its share of them
    - `held`: bytes of weights that it holds from the begin of the step to its end, if they are gathered once
    """

    sent: float
    memory: float
    held: int


def parameter_use(setup: Setup) -> ParameterUse:
    """Return the use of the trained parameters, and of those beside adapters or of a copy, see `ParameterUse`."""
    config, layout = setup.config, setup.method.step_layout
    width = jnp.dtype(DTYPES[config.compute.dtype]).itemsize
    trained, frozen = named_arrays(trainable(setup.model)), weights_of(setup.frozen)
    microbatches = config.batch.microbatches
    per_step = config.compute.gather == "per_step"
    gathers = 1 if per_step else 2 * microbatches
    sent = memory = held = 0.0
    for weights, passes, uses in ((trained, gathers + microbatches, 3), (frozen, gathers, 2)):
        for weight in weights:
            used, others = in_use(layout, weight)
            sent += passes * width * used * (others - 1) / others
            memory += uses * microbatches * width * (used - weight.size / layout.mesh.size)
            held += width * used * per_step
    return ParameterUse(sent, memory, int(held))


def in_use(layout: Layout, weight: NamedArray) -> tuple[int, int]:
    """Return the values of a weight that a device computes with, and the devices over which it gathers them."""
    stored, used = (
        prod(layout.mesh.shape[axis] for axis in layout.mesh_axes(weight.axes, mapping))
        for mapping in (layout.params, layout.compute)
    )
    return weight.size // used, max(1, stored // used)


def devices_of_a_replica(setup: Setup) -> int:
    """Return the number of devices of a replica, which share its end of the slow link."""
    sizes = setup.layout.mesh.shape
    return prod(size for axis, size in sizes.items() if axis not in FAR_AXES)


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
    return on_slow_axes(audit(program, layout.mesh).collectives)


def on_slow_axes(collectives: Iterable[Collective]) -> list[Collective]:
    return [each for each in collectives if set(each.touched) & set(FAR_AXES)]


def base_note(setup: Setup) -> str | None:
    """Return the note about frozen weights in blocks, and about projections that are not; None without blocks."""
    adapter = setup.config.adapter
    if adapter is None or adapter.base == "dtype":
        return None
    pairs = zip(parameters_of(setup.base).items(), weights_or_blocks(setup.stored_base), strict=True)
    held = [(path, leaf, is_quantised(form)) for (path, leaf), form in pairs]
    blocks, others = (sum(leaf.size for _, leaf, own in held if own is wanted) for wanted in (True, False))
    whole = [path for path, leaf, in_blocks in held if not in_blocks and is_of_linear(leaf)]
    beside = f", among them {listed(whole)}, whose last input axis 64 does not divide" if whole else ""
    dtype = setup.config.compute.dtype
    return f"adapter.base is {adapter.base}: {blocks:,} frozen values are in blocks, and {others:,} in {dtype}{beside}."


def weights_or_blocks(tree) -> list:
    """Return the weights of an abstract model as it holds them, with its buffers."""
    return jax.tree.leaves(tree, is_leaf=lambda leaf: is_named(leaf) or is_quantised(leaf))


def is_of_linear(weight: NamedArray) -> bool:
    """Return whether a weight is the matrix of a linear layer, and not of experts or of their choice."""
    names = set(weight.axis_names)
    return any(map(is_layers, names)) and len(names) > 2 and not names & {EXPERTS, ROUTER, SHARED_GATE}
