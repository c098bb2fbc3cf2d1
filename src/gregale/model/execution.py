"""The execution of a model: the placement and precision of its arrays, its kernels, and the scan over its layers.

A layer's kind determines its program: a kernel has one window. So a stack is cut into segments in which a pattern of
kinds repeats. A scan over a segment has a whole pattern in its body, each layer with its own program.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.axis import axis_spec_to_tuple
from haliax.jax_utils import tree_checkpoint_name
from haliax.nn import Linear, ScanCheckpointPolicy
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import PartitionSpec

from gregale.axes.gather import all_gather_weights
from gregale.axes.layout import BATCH, EMBED, EXPERTS, LAYERS, POSITION, AxisMapping, Layout, is_named
from gregale.axes.parameters import Stacks, decoded, is_quantised, is_stacks, position_order, renamed, stack_axis
from gregale.errors import UserError
from gregale.model.adapters import is_lora
from gregale.model.config import DTYPES, ComputeConfig, ModelConfig
from gregale.model.kernels.dispatch import KernelRequest, check_matmul, kernels_for
from gregale.model.kernels.operations import ATTENTION_NAME, PLAIN, Kernels
from gregale.model.kernels.quantised import FORMATS, Quantised, in_eight_bits, quantised_mlp, quantised_product

Kind = NamedArray | int
"""A layer's index in `LlamaConfig.kinds`; an array without axes in a pipeline, whose stages have different layers."""


Label = tuple[int, int]
"""The structure of a layer (`Stacks`) and its kind; equal layers are scanned together."""


class LayerSegment(NamedTuple):
    """Layers with the labels of `pattern`, repeated `repeats` times."""

    pattern: tuple[Label, ...]
    repeats: int

    @property
    def layers(self) -> int:
        return len(self.pattern) * self.repeats


def kind_constants(kinds: tuple[int, ...]) -> dict[str, NamedArray]:
    """Return the kind of every layer as an array along `layers`, named `kind`; nothing for one kind."""
    if len(set(kinds)) == 1:
        return {}
    return {"kind": NamedArray(jnp.asarray(kinds, jnp.int32), (LAYERS,))}


@cache
def layer_segments(labels: tuple[Label, ...], first: int = 0) -> tuple[LayerSegment, ...]:
    """Return the segments of a model's layers by their labels: few, with few layers in their patterns.

    - `first`: a number of layers after which a segment ends
    """
    if first:
        return layer_segments(labels[:first]) + layer_segments(labels[first:])
    best: list[tuple[LayerSegment, ...]] = [()]
    for end in range(1, len(labels) + 1):
        found = [
            (*best[start], LayerSegment(labels[start : start + period], (end - start) // period))
            for start in range(end)
            for period in range(1, end - start + 1)
            if (end - start) % period == 0 and labels[start : end - period] == labels[start + period : end]
        ]
        best.append(min(found, key=lambda cut: sum(1 + len(each.pattern) for each in cut)))
    return best[-1]


def labels_of(layers: Any, kinds: tuple[int, ...]) -> tuple[Label, ...]:
    """Return the label of each layer, of stacked arrays with these kinds."""
    order = layers.order if is_stacks(layers) else (0,) * len(kinds)
    return tuple(zip(order, kinds, strict=True))


def layers_apart(labels: tuple[Label, ...]) -> int:
    """Return the number of layers in the first pattern of labels, if others follow; else 0."""
    period = len(layer_segments(labels)[0].pattern) if labels else 0
    return period if period < len(labels) else 0


def cut(stacked: Any, parts: Sequence[LayerSegment]) -> list[list[Any]]:
    """Return, for each segment and each index of its pattern, a tree of arrays [repeats, ...] from [layers, ...].

    Gradients are joined in the same way, each array once. `Stacks` are cut one by one, and all have `layers` then.
    """
    if not is_stacks(stacked):
        return _cut_stack(stacked, parts)
    pieces = {}
    for structure in dict.fromkeys(stacked.order):
        own = [number for number, part in enumerate(parts) if _own(part, structure).pattern]
        stack = renamed(stacked.parts[structure], stack_axis(structure), LAYERS)
        found = _cut_stack(stack, [_own(parts[number], structure) for number in own])
        pieces |= {(number, structure): iter(each) for number, each in zip(own, found, strict=True)}
    return [[next(pieces[number, label[0]]) for label in part.pattern] for number, part in enumerate(parts)]


def _own(part: LayerSegment, structure: int) -> LayerSegment:
    return part._replace(pattern=tuple(label for label in part.pattern if label[0] == structure))


def _cut_stack(stacked: Any, parts: Sequence[LayerSegment]) -> list[list[Any]]:
    leaves, structure = jax.tree.flatten(stacked)
    by_leaf = [_cut(leaf, parts) for leaf in leaves]
    return [
        [structure.unflatten([pieces[number][place] for pieces in by_leaf]) for place in range(len(part.pattern))]
        for number, part in enumerate(parts)
    ]


def _cut(array: jax.Array, parts: Sequence[LayerSegment]) -> list[list[jax.Array]]:
    """Turn [layers, ...] into [repeats, ...] by segment and index."""

    def places(array: jax.Array, part: LayerSegment) -> list[jax.Array]:
        if len(part.pattern) == 1:
            return [array]
        grouped = array.reshape(part.repeats, len(part.pattern), *array.shape[1:])
        return [each.squeeze(1) for each in jax.lax.split(grouped, [1] * len(part.pattern), axis=1)]

    whole = [array] if len(parts) == 1 else jax.lax.split(array, [part.layers for part in parts])
    return [places(each, part) for each, part in zip(whole, parts, strict=True)]


def joined(pieces: Sequence[Sequence[Any]], labels: tuple[Label, ...], parts: Sequence[LayerSegment]) -> Any:
    """Invert `cut`: return stacked arrays, or `Stacks` of them if layers have several structures."""
    order = tuple(structure for structure, _ in labels)
    if not any(order):
        return _joined_stack(pieces)
    stacks = []
    for structure in range(max(order) + 1):
        own = [
            [piece for piece, label in zip(each, part.pattern, strict=True) if label[0] == structure]
            for each, part in zip(pieces, parts, strict=True)
        ]
        stacks.append(renamed(_joined_stack([each for each in own if each]), LAYERS, stack_axis(structure)))
    return Stacks(stacks, order)


def _joined_stack(pieces: Sequence[Sequence[Any]]) -> Any:
    def whole(*places: jax.Array) -> jax.Array:
        if len(places) == 1:
            return places[0]
        return jnp.stack(places, axis=1).reshape(-1, *places[0].shape[1:])

    of_segments = [jax.tree.map(whole, *places) for places in pieces]
    if len(of_segments) == 1:
        return of_segments[0]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *of_segments)


def in_periods(
    block: Callable, weights: Any, kinds: tuple[int, ...]
) -> tuple[Callable, list[dict[str, Any]], Callable[[Any], Any]]:
    """Return what a pipeline runs in place of single layers: `layer`, and the stacked arrays of each index of a period.

    The third result turns the stacked outs of `layer` into those of single layers, as a scan returns them.

    A period is the pattern of structures that repeats: all stages run the same program. For layers of one structure it
    is one layer. Raises `UserError` if the structures do not repeat.
    """
    labels = labels_of(weights, (0,) * len(kinds))
    parts = layer_segments(labels)
    pattern = parts[0].pattern
    if len(parts) > 1:
        shown = ", ".join(f"{part.repeats} x {[structure for structure, _ in part.pattern]}" for part in parts)
        raise UserError(
            f"pipeline: the stages run one program, and the structures of this model's layers do not repeat: {shown}. "
            "Use a model whose pattern of structures repeats, or no pipeline."
        )
    of_places = [kinds[place :: len(pattern)] for place in range(len(pattern))]

    def layer(x, period, rows, execution):
        outs = []
        for own, of_place in zip(period, of_places, strict=True):
            x, out = block(x, own["weights"], own.get("kind", of_place[0]), rows, execution)
            outs.append(out)
        return x, outs

    stacks = zip(cut(weights, parts)[0], of_places, strict=True)
    periods = [{"weights": own, **kind_constants(of_place)} for own, of_place in stacks]
    return layer, periods, lambda outs: joined([outs], labels, parts)


# Names of a block's intermediates (`jax.ad_checkpoint.checkpoint_name`), which remat policies use.
PROJECTIONS = ["query", "key", "value", ATTENTION_NAME, "attention_out", "gate", "up", "mlp_out"]

CARRY, WEIGHTS = "layer_input", "layer_weights"  # the names of a layer's inputs

CONTEXT = ScanCheckpointPolicy(save_block_internals=[ATTENTION_NAME])  # avoids a second forward pass of attention

REMAT_POLICIES = {
    "none": ScanCheckpointPolicy(disable=True),
    "full": ScanCheckpointPolicy(simple=True),
    "context": CONTEXT,
    "context_offload": ScanCheckpointPolicy(offload_block_internals=[ATTENTION_NAME]),
    "projections": ScanCheckpointPolicy(save_block_internals=PROJECTIONS),
    "offload": ScanCheckpointPolicy(save_carries="offload"),
}

# If `model` splits the stream (`Execution.sequence_sharded`), a device also keeps its part of attention's output. So
# the backward pass adds nothing over `model` again, which pays for the gathers that it repeats.
PART = "part_of_"
PARTS = [f"{PART}attention_out"]
SPLIT_POLICIES = {
    "none": REMAT_POLICIES["none"],
    "full": ScanCheckpointPolicy(save_block_internals=PARTS),
    "context": ScanCheckpointPolicy(save_block_internals=[ATTENTION_NAME, *PARTS]),
    "context_offload": ScanCheckpointPolicy(save_block_internals=PARTS, offload_block_internals=[ATTENTION_NAME]),
    "offload": ScanCheckpointPolicy(save_carries="offload", offload_block_internals=PARTS),
}

TO_HOST = ("offload", "context_offload")  # policies that move saved values to the host's memory

# Layers unrolled in the scan over layers. On CPU the loop's slices and copies cost more than the compile time saves.
UNROLL = {"cpu": 4}


def named(x: NamedArray, name: str) -> NamedArray:
    """Name an intermediate for remat policies."""
    return NamedArray(checkpoint_name(x.array, name), x.axis_names)


@dataclass(frozen=True, kw_only=True)
class LayerScan:
    """The scan over a stack of layers, and what it keeps of each for the backward pass."""

    remat: str = "none"  # name of the policy for a layer's saved values
    splits_stream: bool = False  # as of `SequenceParallel`: its parts are among these values
    unroll: int = 1  # layers unrolled in the scan
    first_layers: int = 0  # layers at the beginning of the stack that have a scan of their own
    # A layer is computed again when its gradient is. Else a compiler for accelerators does so long before: with other
    # layers of a loop's body, or before the loss, where it takes an iteration out of the loop.
    recomputes_late: bool = False

    def scan_layers(
        self, block: Callable, kinds: tuple[int, ...], carry: Any, weights: Any, *more: Any
    ) -> tuple[Any, Any]:
        """Run `carry, out_i = block(carry, weights[i], kinds[i], *more[i])`; return the carry and stacked outs.

        For tuples, with one tree per layer, the outs are a tuple; for `Stacks` they are `Stacks` too.
        """
        if isinstance(weights, tuple):
            outs = []
            for layer in zip(weights, kinds, *more, strict=True):
                carry, out = block(carry, *layer)
                outs.append(out)
            return carry, tuple(outs)
        labels = labels_of(weights, kinds)
        parts, outs, mixed = layer_segments(labels, self.first_layers), [], len(set(labels)) > 1
        # Equal layers after first ones are slower if they are computed again late: 0.8 percent for an 8B model on v5e.
        late = self.recomputes_late and (mixed or not self.first_layers)
        trees = zip(*(cut(tree, parts) for tree in (weights, *more)), strict=True)
        for number, (part, of_trees) in enumerate(zip(parts, trees, strict=True)):
            layers = [list(layer) for layer in zip(*of_trees, strict=True)]
            if number and self.first_layers:
                # The weights are awaited after the first layers, and their gradients are complete before theirs.
                carry, layers = jax.lax.optimization_barrier((carry, layers))
            elif mixed:
                carry, layers = gradients_together((carry, layers))
            carry, out = self._segment(block, part, carry, layers, late)
            outs.append(out)
        return carry, joined(outs, labels, parts)

    def _segment(self, block: Callable, part: LayerSegment, carry, layers, late: bool):
        """Scan one segment; each layer of its pattern saves by the policy the same values as alone."""
        policy = (SPLIT_POLICIES if self.splits_stream else REMAT_POLICIES)[self.remat]
        Layers = Axis(LAYERS, part.repeats)
        if late or (self.first_layers and part.repeats == 1):
            policy = replace(policy, prevent_cse=True)
        unroll = min(max(1, self.unroll // len(part.pattern)), part.repeats)
        if len(part.pattern) == 1:
            ((_, kind),) = part.pattern

            def alone(carry, weights, *more):
                return block(carry, weights, kind, *more)

            carry, out = hax.scan(alone, Layers, remat=policy, unroll=unroll)(carry, *layers[0])
            return carry, (out,)

        def one(kind: int) -> Callable:
            def layer(carry, weights, *more):
                return block(tree_checkpoint_name(carry, CARRY), weights, kind, *more)

            return policy.checkpoint(CARRY, WEIGHTS, layer)

        def pattern(carry, *layers):
            outs = []
            for (_, kind), (weights, *more) in zip(part.pattern, layers, strict=True):
                carry, out = one(kind)(*gradients_together((carry, weights)), *more)
                outs.append(out)
            return carry, tuple(outs)

        return hax.scan(pattern, Layers, unroll=unroll)(carry, *layers)


@jax.custom_vjp
def gradients_together(values):
    """Return the values, whose gradients are used only when all are complete.

    Between layers, the compiler then does not put off the products for weights, which need the layer's activations.
    """
    return values


gradients_together.defvjp(
    lambda values: (values, None), lambda _, gradients: (jax.lax.optimization_barrier(gradients),)
)


LayerFunction = Callable[[NamedArray, Any, Any, "Execution"], tuple[NamedArray, Any]]
"""layer(x [batch, ...], arrays of one layer, rows [batch, ...], execution) -> x, sums over its rows"""

Block = Callable[..., Any]
"""block(x [batch, ...], weights of one layer, the layer's kind, rows [batch, ...], execution) -> x"""


@dataclass(frozen=True, kw_only=True)
class SequenceParallel:
    """The placement of activations: on the mesh axes of `compute`, and the stream between the halves of layers."""

    layout: Layout  # mesh and mappings of one replica
    splits_stream: bool = False  # `model` splits the stream, see `stream`

    def placed(self, activation: NamedArray) -> NamedArray:
        return self.layout.constrain(activation, self.layout.compute)

    def splits(self, positions: int) -> bool:
        """Return whether `stream` splits sequences of this length over `model`."""
        return self.splits_stream and positions % self.layout.devices((POSITION, "mlp"), self.layout.compute) == 0

    def sequence_sharded(self, x: NamedArray) -> NamedArray:
        """Place the stream [batch, position, embed], to which halves of layers add: `model` splits positions too.

        So the sum of a product over `model` is a reduce-scatter, and a gather precedes the next product: together an
        all-reduce. Norms and sums between them, and what layers save of them, are split (Korthikanti et al. 2022,
        arXiv 2205.05198).
        """
        return self.layout.constrain(x, self.stream_mapping(x))

    def stream_mapping(self, x: NamedArray) -> AxisMapping:
        compute = self.layout.compute
        if not self.splits(x.resolve_axis(POSITION).size):
            return compute
        return {**compute, POSITION: self.layout.mesh_axes((POSITION, "mlp"), compute)}

    def sequence_scatter(self, x: NamedArray) -> NamedArray:
        """Keep a device's part of a layer's input, in what is saved too: the compiler could gather it for products."""
        return self.sequence_sharded(x) if self.splits(x.resolve_axis(POSITION).size) else x

    def sequence_gather(self, x: NamedArray) -> NamedArray:
        """Gather the input of products from the stream."""
        return self.placed(x) if self.splits(x.resolve_axis(POSITION).size) else x

    def summed(self, x: NamedArray, name: str) -> NamedArray:
        """Name the output of products, with the parts of the stream if it is split; the backward pass gathers it."""
        if not self.splits(x.resolve_axis(POSITION).size):
            return named(x, name)
        return named(self.sequence_sharded(self.placed(x)), PART + name)


@dataclass(frozen=True, kw_only=True)
class Products:
    """The precision of weights in use, and the products of linear layers."""

    layout: Layout  # mesh and mappings of one replica
    dtype: jnp.dtype = jnp.float32  # of activations and gathered weights
    kernels: Kernels = PLAIN  # the form of the model's operations
    matmul: str = "dtype"  # the numbers that the layers' linear products take: those of `dtype`, or 8-bit ones
    weights_ready: bool = False  # the input weights are gathered already
    dropout_keys: NamedArray | None = None  # of each row [batch], for adapters in training; None: they drop nothing

    def gathered(self, weights) -> Any:
        """Gather weights, unless they are ready; those in few bits are decoded for use."""
        return decoded(
            weights if self.weights_ready else all_gather_weights(weights, self.layout, self.dtype), self.dtype
        )

    def gathered_layer(self, weights) -> Any:
        """Gather the weights of a layer whose products are `project` and `mlp`, as the numbers that these take."""
        found = self.gathered(weights)
        if self.weights_ready or self.matmul == "dtype":
            return found

        def one(layer, shard):
            if is_named(layer) and self.matmul == "int8" and layer.axis_names[0] == EXPERTS and layer.ndim == 3:
                return in_eight_bits(self.quantisation(), layer, shard.astype(self.dtype), [layer.axis_names[1]])
            if not isinstance(layer, Linear) or is_quantised(shard.weight):
                return layer
            inputs, exact = [axis.name for axis in axis_spec_to_tuple(layer.In)], shard.weight.astype(self.dtype)
            return replace(layer, weight=in_eight_bits(self.quantisation(), layer.weight, exact, inputs))

        return jax.tree.map(one, found, weights, is_leaf=lambda node: isinstance(node, Linear) or is_named(node))

    def project(self, layer: Linear, x: NamedArray) -> NamedArray:
        """Return the product of a linear layer, its bias, and its adapter, by `compute.matmul`."""
        if is_lora(layer):
            seen = x
            if layer.dropout > 0 and self.dropout_keys is not None:
                order = position_order(x.resolve_axis(POSITION).size, self.layout.context)
                seen = layer.dropped(x, self.dropout_keys, order)
            inner = self.kernels.project(layer.lora_a, seen) * layer.scale
            inner = self.layout.constrain(inner, self.layout.compute)
            return self.project(layer.base, x) + self.kernels.project(layer.lora_b, inner)
        if self.matmul == "dtype":
            return self.kernels.project(layer, x)
        product = quantised_product(self.quantisation(), x, layer.weight)
        return product if layer.bias is None else product + layer.bias

    def mlp(self, x: NamedArray, layers: tuple[Linear, Linear, Linear], activation: str) -> NamedArray | None:
        """Return down(activation(gate(x)) * up(x)) as one operation; None: there is none for `compute.matmul`."""
        if self.matmul != "int8" or activation != "silu":
            return None
        if any(layer.bias is not None or is_lora(layer) for layer in layers):
            return None
        return quantised_mlp(self.quantisation(), x, tuple(layer.weight for layer in layers))

    def quantisation(self) -> Quantised:
        mesh, compute = self.layout.mesh, self.layout.compute
        shared = {name: self.layout.devices((name,), compute) for name in compute}
        parts = tuple((name, count) for name, count in shared.items() if count > 1)
        return Quantised(FORMATS[self.matmul], mesh.devices.flat[0].platform, parts, self.layout)


@dataclass(frozen=True, kw_only=True)
class SelfAttention:
    """Attention of the positions of a batch to one another."""

    layout: Layout  # mesh and mappings of one replica
    kernels: Kernels = PLAIN  # the form of the model's operations

    def attend(self, q, k, v, segments, window: int | None, cap: float | None = None, sinks=None) -> jax.Array:
        """Compute causal self-attention, see `Attend`; a kernel runs on each device: its rows, positions and heads.

        The partitioner would gather all operands of a kernel. Axes that are mapped outside of this call (`replica`, and
        a pipeline's `stage` and `data`) stay split.
        """
        attend = partial(self.kernels.attend, window=window, cap=cap)
        return self._on_devices(attend, [("head_size",)])(q, k, v, segments, sinks=sinks)

    def attend_with_largest(self, q, k, v, segments, window: int | None, cap: float | None = None, sinks=None):
        """Return the same and its largest scores, see `AttendWithLargest`; None for a form that has none."""
        if self.kernels.attend_with_largest is None:
            return self.attend(q, k, v, segments, window, cap, sinks), None
        attend = partial(self.kernels.attend_with_largest, window=window, cap=cap)
        return self._on_devices(attend, [("head_size",), ()])(q, k, v, segments, sinks=sinks)

    def _on_devices(self, attend: Callable, outs: Sequence[tuple[str, ...]]) -> Callable[..., Any]:
        """Return `attend(q, k, v, segments, sinks=...)` on each device; `outs`: axes of its results after `heads`."""
        if not self.kernels.opaque:
            return attend

        def spec(*names: str) -> PartitionSpec:
            return self.layout.spec((BATCH, POSITION, *names), self.layout.compute)

        def on_device(q, k, v, segments, sinks):
            return attend(q, k, v, segments, sinks=sinks)

        query, key = spec("heads", "head_size"), spec("kv_heads", "head_size")
        found = [spec("heads", *names) for names in outs]
        run = self.layout.shard_map(
            on_device, (query, key, key, spec(), query), tuple(found) if len(found) > 1 else found[0]
        )
        return lambda q, k, v, segments, sinks: run(q, k, v, segments, sinks)


@dataclass(frozen=True, kw_only=True)
class Execution(SequenceParallel, Products, SelfAttention, LayerScan):
    """The settings for running a model, passed to it explicitly: those of its parts, each of which runs alone too."""

    loss_block: int = 1024  # tokens whose logits are in memory at a time on a device
    fused_logits: bool = False  # the compiler computes exponentials of logits with the product
    evaluates: bool = False  # a loss is of held-out text: it needs no auxiliary terms
    measures_logits: bool = False  # layers return the largest logits of their heads
    # runs a stack of layers, `stack(block, x, weights, rows)`; None: they are scanned
    stack: Callable[[LayerFunction, NamedArray, Any, Any], tuple[NamedArray, Any]] | None = None

    def run_layers(self, block: Block, kinds: tuple[int, ...], x: NamedArray, weights, rows) -> NamedArray:
        """Run `x = block(x, weights[i], kinds[i], rows, execution)` for every i along the layers.

        - `kinds`: of every layer, as an index in `LlamaConfig.kinds`
        - `weights`: named arrays with the leading axis `layers`, ungathered, or `gregale.axes.parameters.Stacks`
        - `rows`: named arrays [batch, ...], the same for all layers (positions, segment ids); not differentiated
        """

        def with_out(x, weights, kind, rows, execution, square=None):
            del square
            return block(x, weights, kind, rows, execution), None

        return self.run_layers_with_outs(with_out, kinds, x, weights, rows)[0]

    def run_layers_with_outs(
        self, block: Block, kinds: tuple[int, ...], x: NamedArray, weights, rows
    ) -> tuple[NamedArray, Any]:
        """Run `x, out_i = block(x, weights[i], kinds[i], rows, execution, square)`; return x and the stacked outs.

        A pipeline returns their sums over the rows: its outs are a tree of named arrays with `batch`.

        - `square`: the mean square of x over `embed` (float32), or None
        """
        if self.stack is not None:

            def summed(x, weights, kind, rows, execution):
                rows, keys = rows

                def layer(x, weights):
                    x, out = block(x, weights, kind, rows, replace(execution, dropout_keys=keys), None)
                    return x, jax.tree.map(lambda leaf: hax.sum(leaf, BATCH), out, is_leaf=is_named)

                if any(map(is_quantised, jax.tree.leaves(weights, is_leaf=is_quantised))):
                    # Its backward pass decodes again: else a stage would keep the weights of all its layers.
                    layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*PROJECTIONS))
                return layer(x, weights)

            layer, periods, joined = in_periods(summed, weights, kinds)
            x, sums = self.stack(layer, x, periods, (rows, self.dropout_keys))
            return x, joined(sums)

        def handed_on(x: NamedArray) -> tuple[NamedArray, NamedArray | None]:
            if not self.kernels.hands_on_squares:
                return x, None
            x = channels_last(x, self.layout, self.stream_mapping(x))
            return x, mean_square(x)

        def step(carry, weights, kind):
            x, out = block(carry[0], weights, kind, rows, self, carry[1])
            return handed_on(x), out

        (x, _), outs = self.scan_layers(step, kinds, handed_on(x), weights)
        return x, outs


def channels_last(x: NamedArray, layout: Layout, mapping: AxisMapping) -> NamedArray:
    """Keep the last axis together in memory, also in the gradient.

    XLA:TPU else puts positions last in the sums between layers, and turns a weight of each layer for that. It is done
    on each device, because the partitioner gathers what has such a constraint.
    """
    spec = layout.spec(x.axes, mapping)
    order = MemoryLayout(major_to_minor=tuple(range(len(x.axes))))
    constrain = layout.shard_map(lambda x: with_layout_constraint(x, order), (spec,), spec)
    ordered = jax.custom_vjp(constrain)
    ordered.defvjp(lambda x: (constrain(x), None), lambda _, cotangent: (constrain(cotangent),))
    return NamedArray(ordered(x.array), x.axis_names)


def mean_square(x: NamedArray) -> NamedArray:
    """Return the mean square over `embed` in float32, as a constant: the rule of the norm that takes it derives it."""
    fixed = jax.lax.stop_gradient(x.array).astype(jnp.float32)
    return hax.mean(hax.square(NamedArray(fixed, x.axis_names)), EMBED)


def execution(config: ComputeConfig, layout: Layout, model: ModelConfig) -> Execution:
    """Return the execution of a configuration on the mesh of `layout`, which is the layout of one replica.

    Raises `UserError` if the configured attention or products do not fit the devices or the model, or if the compiler
    cannot unroll the policy's transfers.
    """
    device = layout.mesh.devices.flat[0]
    unroll = config.unroll or UNROLL.get(device.platform, 1)
    if device.platform == "tpu" and config.remat in TO_HOST and unroll > 1:
        raise UserError(
            f"compute.remat is {config.remat} and compute.unroll is {unroll}: the TPU compiler ends in an internal "
            "error where a loop that moves values to the host is unrolled. compute.unroll: 1 would work, or "
            "compute.remat: context."
        )
    check_matmul(config.matmul, device)
    dtype = jnp.dtype(DTYPES[config.dtype])
    task = KernelRequest(device, config.autodiff_rules, dtype, model.head_width, model.score_softcap, layout.context)
    return Execution(
        layout=layout.inside_replica(),
        dtype=dtype,
        remat=config.remat,
        unroll=unroll,
        kernels=kernels_for(task, config.attention),
        matmul=config.matmul,
        loss_block=config.loss_block,
        fused_logits=device.platform == "tpu",
        recomputes_late=device.platform != "cpu",
        # `projections` adds nothing over `model` again, so that the repeated gathers would come on top.
        splits_stream=shares_layers(layout) and config.remat in SPLIT_POLICIES and model.experts is None,
    )


def shares_layers(layout: Layout) -> bool:
    """Return whether the same devices, more than one, split both halves of a layer: attention and MLP."""
    heads, mlp = (layout.mesh_axes((name,), layout.compute) for name in ("heads", "mlp"))
    return heads == mlp and layout.devices(("mlp",), layout.compute) > 1
