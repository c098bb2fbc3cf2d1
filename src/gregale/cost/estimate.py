"""Provides the memory of a step on one device: the compiler's report, and an estimate in closed form from shapes.

`benchmarks/memory_sweep.py` writes `compared.json`: the kind, the sizes and the peak in bytes of each step.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any

import jax
from haliax import Axis, NamedArray

from gregale.axes.layout import (
    CONTEXT,
    EXPERTS,
    LORA_RANK,
    REPLICA,
    ROUTER,
    SHARED_GATE,
    AxisMapping,
    Layout,
    Tree,
    is_layers,
)
from gregale.axes.parameters import LossBlocks, chunks_reached, exchanges_rows, loss_blocks, rows_to_a_device
from gregale.codecs.codec import WireFormat


@dataclass(frozen=True)
class PipelineShape:
    """A pipeline of the layers by its numbers.

    - `microbatches`: M, the number in the pipeline at one time.
    - `repeats`: R, the number of times that each microbatch passes all stages.
    - `iterations`: T, the iterations of a pass.
    - `gather`: frequency of weight gathers: `per_repeat`, `per_iteration` or `once`.
    """

    microbatches: int
    repeats: int
    iterations: int
    gather: str

    @property
    def drain(self) -> int:
        """Return the iterations in which a stage idles."""
        return self.iterations - self.microbatches * self.repeats


@dataclass(frozen=True)
class Backend:
    """Properties of a compiler that affect a step.

    - `narrowest_bytes`: bytes of a bfloat16 value during transfers and products; XLA:CPU widens it to float32.
    - `hoists_gathers`: a gather that all microbatches share runs once, before the loop.
    - `merges_sums`: `sum(a) + sum(b)` over devices becomes one `sum(a + b)`.
    - `scatters_layers`: the sum of a layer's gradients is a reduce-scatter; XLA:CPU does an all-reduce.
    - `fuses_softmax`: a softmax and its gradient need only few arrays of scores or logits.
    - `lanes`: the last axis of an array is padded to a multiple: a head with an attention kernel; `gradient_values`.
    - `narrows_ahead`: all weights of a device are cast to the compute dtype before the loop over layers.
    - `adds_at_end`: a microbatch's gradients of all layers exist before their addition to the buffers.
    - `least`, `most`: the compiler's peak over the closed form's in compiled examples, docs/plan.md.
    """

    narrowest_bytes: int
    hoists_gathers: bool
    merges_sums: bool
    scatters_layers: bool
    fuses_softmax: bool
    lanes: int = 1
    narrows_ahead: bool = False
    adds_at_end: bool = False
    least: float = 0.85
    most: float = 1.17

    def range(self, closed_form: float) -> tuple[int, int]:
        """Return the bytes between which the compiler's peak lies if the closed form gives `closed_form`."""
        return int(self.least * closed_form), int(self.most * closed_form)


CPU = Backend(narrowest_bytes=4, hoists_gathers=True, merges_sums=False, scatters_layers=False, fuses_softmax=False)
ACCELERATOR = Backend(
    narrowest_bytes=2, hoists_gathers=False, merges_sums=True, scatters_layers=True, fuses_softmax=True, least=0.65
)
TPU = replace(ACCELERATOR, lanes=128, narrows_ahead=True, adds_at_end=True, least=0.84, most=1.25)


@dataclass(frozen=True)
class ParameterShape:
    """The parameters of any model and the batch of a step: the sizes that the traffic of methods depends on.

    - `layout`: the mesh and the mappings of all replicas
    - `weights`: the abstract parameters; those of layers have the axis `layers`
    - `rows`, `positions`: sequences in a step's batch, and tokens of a sequence
    - `microbatches`: parts of a replica's batch
    - `compute_bytes`: bytes of a value of the compute dtype
    """

    layout: Layout
    weights: Sequence[NamedArray]
    rows: int
    positions: int
    microbatches: int
    compute_bytes: int

    @property
    def mesh(self) -> dict[str, int]:
        return dict(self.layout.mesh.shape)

    @property
    def parameters(self) -> int:
        """Return the number of values in all weights."""
        return sum(values(weight.axes) for weight in self.weights)

    def on_device(self, weight: NamedArray, mapping: AxisMapping) -> int:
        """Return the number of values of a weight on one device under a mapping, over all layers."""
        split = prod(self.mesh[axis] for axis in self.layout.mesh_axes(weight.axes, mapping))
        return values(weight.axes) // split

    def split_by(self, weight: NamedArray, mapping: AxisMapping) -> tuple[str, ...]:
        """Return the mesh axes larger than 1 that split a weight under a mapping, in mesh order."""
        found = self.layout.mesh_axes(weight.axes, mapping)
        return tuple(axis for axis, size in self.mesh.items() if axis in found and size > 1)


@dataclass(frozen=True)
class StepShape(ParameterShape):
    """A PSDP step of a decoder by its sizes.

    - `remat`: the policy for a layer's saved activations
    - `per_step`: weights are gathered once per step, not once per layer
    - `loss_block`: tokens whose logits exist at one time
    - `unrolled`: there is no loop over layers
    - `scores`: attention holds its scores; a kernel does not
    - `rules`: differentiation rules (`Kernels.rules`); those of a platform save less than JAX
    - `windows`: maximum number of keys that a query sees, for equal shares of the layers; None: all earlier ones
    - `norms_after`: the outputs of both halves of a layer are normalised, so that the backward pass needs them
    - `norms_over_heads`: queries are normalised over all heads, and keys, so that `model` shares their mean squares
    - `sums_behind`: sums of gradients over devices overlap the backward pass of the layers below
    - `splits_stream`: `model` splits the stream between the halves of layers too, see `Execution.sequence_sharded`
    - `pipeline`: pipeline of the layers; None: they are scanned
    - `matmul`: numbers of the layers' products (`compute.matmul`)
    - `fuses_logits`: logits are in memory only as a group's exponentials (`Execution.fused_logits`, a whole vocabulary)
    - `active`: experts of a token; 0 for layers without experts
    - `balance_terms`: names of the terms of the loss that balance experts
    - `z_loss`: the loss has a z-loss
    - `frozen`: weights beside adapters, which `weights` then are: in the compute dtype, without gradients
    - `quantised`: further weights beside adapters, which are held and gathered in `blocks`
    - `drops`: adapters drop inputs, by keys of rows and of the first row of A
    - `reference`: frozen weights with whose log-likelihoods the loss compares (DPO): beside adapters, or a copy
    """

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    remat: str
    per_step: bool
    loss_block: int
    unrolled: bool = False
    scores: bool = True
    rules: str = "plain"
    windows: Sequence[int | None] = (None,)
    norms_after: bool = False
    norms_over_heads: bool = False
    sums_behind: bool = False
    splits_stream: bool = False
    pipeline: PipelineShape | None = None
    matmul: str = "dtype"
    fuses_logits: bool = False
    active: int = 0
    balance_terms: Sequence[str] = ()
    z_loss: bool = False
    frozen: Sequence[NamedArray] = ()
    quantised: Sequence[NamedArray] = ()
    blocks: WireFormat | None = None
    drops: bool = False
    reference: Sequence[NamedArray] = ()

    @property
    def computed(self) -> list[NamedArray]:
        """Return all weights of the computation, trained and frozen."""
        return [*self.weights, *self.frozen, *self.quantised]

    @property
    def adapts(self) -> bool:
        return bool(self.frozen)

    def format_of(self, weight: NamedArray) -> WireFormat | None:
        """Return the format of the blocks that hold a weight; None: it is an array of floats."""
        return self.blocks if any(each is weight for each in self.quantised) else None

    @property
    def tokens(self) -> int:
        """Return the tokens of one microbatch on one device."""
        return self.rows_here * self.positions // self.mesh[CONTEXT]

    @property
    def rows_here(self) -> int:
        """Return the rows of one microbatch of which one device has tokens."""
        return self.rows // (self.microbatches * prod(self.mesh[axis] for axis in BATCH_MESH_AXES if axis in self.mesh))

    @property
    def reaches(self) -> list[int | None]:
        """Return the chunks that each of `windows` reaches, see `chunks_reached`."""
        devices = self.mesh[CONTEXT]
        return [chunks_reached(self.positions // (2 * devices), devices, window) for window in self.windows]

    def shared_keys(self, reach: int | None) -> int:
        """Return a device's values of a layer's keys, or values, with those of other devices; 0 if it shares nothing.

        - `reach`: see `reaches`
        """
        if (devices := self.mesh[CONTEXT]) == 1:
            return 0
        here = self.rows_here * self.positions // devices * self.kv_heads // self.mesh["model"] * self.head_size
        return here * (devices if reach is None else reach + 1)

    @property
    def stream(self) -> int:
        """Return a device's values of the stream between the halves of layers."""
        return self.tokens * self.embed // (self.mesh["model"] if self.splits_stream else 1)

    @property
    def embed(self) -> int:
        return self._size("embed")

    @property
    def vocabulary(self) -> int:
        """Return the rows of the table on one device."""
        return self._size("vocab") // self.mesh["model"]

    @property
    def mlp(self) -> int:
        """Return a token's values of the feed-forward layer on one device, of all its experts, unless they are
        exchanged; the mean, if layers differ."""
        inner = {
            (each.axes[0], is_of_experts(each)): axis.size
            for each in self.stacked()
            for axis in each.axes
            if axis.name == "mlp"
        }
        active = 0 if self.expert_axes else self.active
        found = sum(Layers.size * width * (active if of else 1) for (Layers, of), width in inner.items())
        return found // (self.layers * self.mesh["model"])

    @property
    def active_parameters(self) -> int:
        """Return the number of values that a token is multiplied with, or looked up in: all weights but of the experts
        that it does not pass through."""
        return sum(map(self.active_values, self.computed))

    def active_values(self, weight: NamedArray) -> int:
        """Return the values of a weight in all layers that take part in the computation of one token."""
        count = values(weight.axes)
        return count * self.active // weight.resolve_axis(EXPERTS).size if is_of_experts(weight) else count

    @property
    def layers_with_experts(self) -> int:
        return max((layers_of(each) for each in self.computed if is_of_experts(each)), default=0)

    @property
    def pairs(self) -> int:
        """Return the (token, expert) pairs of one microbatch on one device."""
        return self.tokens * self.active

    @property
    def expert_width(self) -> int:
        """Return the width of an expert on one device; 0 without experts."""
        widths = [each.resolve_axis("mlp").size for each in self.computed if is_of_experts(each)]
        return max(widths, default=0) // self.mesh["model"]

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Return the mesh axes over which experts are exchanged; empty if they are gathered."""
        return self.layout.mesh_axes((EXPERTS,), self.layout.compute)

    @property
    def exchanged_rows(self) -> int:
        """Return the rows that one device sends in a round of an exchange, and gets; 0 if experts are gathered."""
        if not self.expert_axes:
            return 0
        devices = prod(self.mesh[axis] for axis in self.expert_axes)
        return devices * rows_to_a_device(self.pairs, devices)

    def _size(self, name: str) -> int:
        return next(axis.size for weight in self.computed for axis in weight.axes if axis.name == name)

    @property
    def shards(self) -> int:
        """Return the number of devices of a replica with different rows and parameters."""
        return self.mesh[CONTEXT] * self.mesh["data"] * self.mesh["stage"]

    @property
    def exchanges_rows(self) -> bool:
        """Return whether devices exchange the embedding's rows instead of a gather of the table."""
        return exchanges_rows(self.tokens, self.embed, self.vocabulary, self.compute_bytes, self.shards)

    def uses(self, weight: NamedArray) -> int:
        """Return the number of uses of a complete weight in a pass: an embedding is used for the lookup, unless devices
        exchange rows, and as the head, if there is no other."""
        if weight.axes[0].name != "vocab":
            return 1
        heads = [each for each in self.single() if each.axes[0].name != "vocab" and has_vocabulary(each)]
        return (not heads) + (not self.exchanges_rows)

    @property
    def loss_blocks(self) -> LossBlocks:
        """Return the blocks into which the loss splits a device's tokens."""
        return loss_blocks(self.tokens, self.embed, self.compute_bytes, self.loss_block, self.fuses_logits)

    def stacked(self) -> list[NamedArray]:
        """Return the weights of the layers."""
        return [weight for weight in self.computed if is_stacked(weight)]

    def single(self) -> list[NamedArray]:
        """Return the weights outside of layers: embedding, head, last norm."""
        return [weight for weight in self.computed if not is_stacked(weight)]

    def gradient_values(self, weight: NamedArray, lanes: int) -> int:
        """Return the size of a device's buffer for the gradient of a weight, over all layers.

        A buffer that is reduced over `replica` has the order of the weight's axes. If the last axis is split, a device
        has few contiguous values of it, and pads them to whole lanes; not for experts, whose sums are scattered by the
        model itself.
        """
        count, last = self.on_device(weight, self.layout.params), weight.axes[-1]
        shards = prod(self.mesh[axis] for axis in self.layout.mesh_axes((last,), self.layout.params))
        if (
            shards == 1
            or is_of_experts(weight)
            or self.split_by(weight, self.layout.opt_state) == self.split_by(weight, self.layout.params)
        ):
            return count
        width = last.size // shards
        return count // width * -(-width // lanes) * lanes


BATCH_MESH_AXES = ("island", REPLICA, "data", "stage")


def values(axes: Sequence[Axis]) -> int:
    return prod(axis.size for axis in axes)


def has_vocabulary(weight: NamedArray) -> bool:
    return any(axis.name == "vocab" for axis in weight.axes)


def is_of_experts(weight: NamedArray) -> bool:
    """Return whether a weight has a matrix, or a bias, for each expert."""
    return any(axis.name == EXPERTS for axis in weight.axes)


def is_of_router(weight: NamedArray) -> bool:
    """Return whether a weight gives numbers of a token that weigh experts, or the MLP beside them."""
    return is_of_choice(weight) or weight.axes[-1].name == SHARED_GATE


def is_of_choice(weight: NamedArray) -> bool:
    """Return whether a weight, and no bias, gives a token's logits of the experts."""
    return weight.axes[-1].name == ROUTER and len(weight.axes) > 2


def is_of_linear(weight: NamedArray) -> bool:
    """Return whether a weight is the matrix of a linear layer."""
    return is_stacked(weight) and len(weight.axes) > 2 and not is_of_experts(weight) and not is_of_router(weight)


def in_eight_bits(weight: NamedArray, matmul: str) -> bool:
    """Return whether `compute.matmul` quantises a weight: the matrix of a linear layer, or by `int8` of experts."""
    if is_of_experts(weight):
        return matmul == "int8" and len(weight.axes) > 3
    return matmul != "dtype" and is_of_linear(weight)


def is_stacked(weight: NamedArray) -> bool:
    return any(is_layers(axis.name) for axis in weight.axes)


def layers_of(weight: NamedArray) -> int:
    """Return the number of layers that have a part of a weight; 1 if it belongs to none."""
    return next((axis.size for axis in weight.axes if is_layers(axis.name)), 1)


FLOAT32 = 4
SCORE_ARRAYS = 4  # the backward pass of softmax(scores) holds scores, probabilities and both gradients, unless fused
HEAD_ARRAYS = 8  # query, key, value and the attention's output, each with its gradient
MLP_ARRAYS = 6  # gate, up and their product, each with its gradient
PAIR_ARRAYS = 2  # of the stream's width, for (token, expert) pairs: what experts take, and gradients of what they give
EXPERT_ARRAYS = 3  # of the experts' width; the kernels' rule needs few at one time (all fitted to compiled peaks)
SENT_ARRAYS, SENT_EXPERT_ARRAYS = 5, 4  # the same for rows of an exchange: as they are sent, as they arrive, and sorted
EXPERT_GRADIENTS = 0.5  # of a layer's gathered experts, whose gradients are scattered one matrix after another
NARROW_MLP_ARRAYS, INTEGER_ARRAYS = (
    3,
    5,
)  # with int8: gate, up, one gradient; integers of the others, of two by both axes
KEY_ARRAYS = 6  # gathered keys and values, their gradients, and one more of each in the order of the sequence
EMBED_ARRAYS = 7  # the residual stream, both norms and both outputs, and gradients of the last two
INPUT_GRADIENTS = 5  # by query, key, value, gate and up separately, if the compiler does not sum them first
GATHERED_ARRAYS = 4  # of these, if `model` splits the stream: both norms' outputs, and two gradients
FUSED_NORMS = 1  # of the norms' outputs XLA:TPU computes one where it is read (fitted to compiled peaks)
# The last axes of factors, B of those that take a norm's output, and A of the others.
QUERY_TO_VALUE, GATE_OR_UP = (("heads", "head_size"), ("kv_heads", "head_size")), (LORA_RANK, "mlp")
OUT, DOWN = ("head_size", LORA_RANK), ("mlp", LORA_RANK)
LOGIT_ARRAYS, FUSED_LOGIT_ARRAYS = 3, 2  # logits, exponentials and their gradient; fused, two of them


@dataclass(frozen=True)
class CompilerMemory:
    """Bytes on one device by the compiler's plan.

    `peak` is the compiler's, or else arguments + results + temporaries without the results that overwrite arguments:
    an upper bound, because not all of them exist at the same time.
    """

    arguments: int
    results: int
    temporaries: int
    aliased: int
    reported_peak: int | None = None

    @property
    def peak(self) -> int:
        if self.reported_peak is not None:
            return self.reported_peak
        return self.arguments + self.results + self.temporaries - self.aliased


def compiler_memory(compiled: jax.stages.Compiled, has_peak: bool = False) -> CompilerMemory:
    """Return the compiler's memory report of a program.

    - `has_peak`: the report's peak is valid; XLA:CPU omits the temporaries
    """
    found: Any = compiled.memory_analysis()
    return CompilerMemory(
        arguments=found.argument_size_in_bytes,
        results=found.output_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        reported_peak=found.peak_memory_in_bytes if has_peak else None,
    )


def bytes_on_device(tree: Tree) -> int:
    """Return the bytes on one device of a tree of `ShapeDtypeStruct`s with shardings."""
    return sum(
        prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None
    )


@dataclass(frozen=True)
class Estimate:
    """The closed form, in bytes on one device.

    - `arguments`: parameters, optimizer state and batch.
    - `buffers`: gradients summed over microbatches.
    - `saved`: activations that layers keep for the backward pass.
    - `tables`: embedding and head, if they are gathered before the loop; with `per_step` all weights.
    - `working`: the largest other set that exists at one time: one layer's backward pass, or the loss.
    - `update`: temporaries of the optimizer besides the buffers, after the gradients' temporaries are freed.
    """

    arguments: int
    buffers: int
    saved: int
    tables: int
    working: int
    update: int

    @property
    def peak(self) -> int:
        return self.arguments + self.buffers + max(self.saved + self.tables + self.working, self.update)


def estimate_memory(step: StepShape, arguments: int, backend: Backend, update: int = 0) -> Estimate:
    """Return the memory of a PSDP step in closed form; `arguments` are the bytes of state and batch on one device.

    The peak is in the backward pass of a layer, or in the loss if the vocabulary is large, or in the optimizer if it
    needs whole matrices: it needs `update` besides the updates. Attention without a kernel counts as XLA compiles it:
    scores of all heads of a microbatch, in float32 and, for the products, in the compute dtype. XLA:CPU holds four
    arrays of scores in float32, and the mask.
    """
    buffers = FLOAT32 * sum(step.gradient_values(weight, backend.lanes) for weight in step.weights)
    uses = [each for each in step.single() if step.uses(each)]
    gathered = step.computed if step.per_step else uses if backend.hoists_gathers else []
    if (step.per_step or backend.hoists_gathers) and not step.adapts:
        of_copy = [each for each in step.reference if step.per_step or (not is_stacked(each) and step.uses(each))]
        gathered = [*gathered, *of_copy]
    # A compiler that widens bfloat16 keeps both forms of weights that it gathered before the loop.
    copies = step.compute_bytes + (backend.narrowest_bytes if backend.narrowest_bytes > step.compute_bytes else 0)
    return Estimate(
        arguments=arguments,
        buffers=buffers,
        saved=step.layers * saved_by_layer(step, backend),
        tables=copies * sum(step.on_device(weight, step.layout.compute) for weight in gathered),
        working=max(_layer(step, backend) + _beside_layers(step, backend), loss_bytes(step, backend)),
        update=update,
    )


def _scores(step: StepShape) -> int:
    """Return the size of a layer's scores [rows, heads, position, position] on a device; 0 for a kernel."""
    if not step.scores:
        return 0
    return step.tokens * step.positions * step.heads // step.mesh["model"]


def head_values(step: StepShape, backend: Backend) -> int:
    """Return a device's values of a token's query heads, or of their outputs."""
    lanes = 1 if step.scores else backend.lanes
    return step.heads // step.mesh["model"] * -(-step.head_size // lanes) * lanes


def saved_by_layer(step: StepShape, backend: Backend) -> int:
    """Return the bytes that one layer saves on the device for its backward pass, over a microbatch's tokens.

    With `none` these are all arrays that JAX differentiates: gate, up, and four products of them; four arrays of the
    residual stream's width, and four more in float32 around its norms, as around those of queries and keys; and the
    weights, if they are gathered by layer.
    A platform's rules keep three arrays for the four products, and no float32 around norms. Attention by the CPU's
    rules keeps no scores, but its output twice, and of whole sequences its inputs and one output in float32.
    Beside frozen weights the inputs of products are kept for factors alone, and what these make of them.
    """
    narrow, tokens, model = step.compute_bytes, step.tokens, step.mesh["model"]
    heads, keys = (count * step.head_size // model for count in (step.heads, step.kv_heads))
    stream = tokens * step.embed * narrow
    part = step.stream * narrow
    inputs = part * (2 if step.splits_stream else 1)  # of the layer, and of its second half if `model` splits it
    blocked = step.rules == "cpu" and not step.scores
    attended = FLOAT32 if blocked and step.layout.context == 1 else narrow
    match step.remat:
        case "full" | "context_offload":
            return inputs
        case "offload":
            return 0
        case "context" | "attention":
            return inputs + tokens * head_values(step, backend) * attended
        case "projections":
            return 2 * stream + tokens * (2 * heads + 2 * keys + 2 * step.mlp) * narrow
    weights = 0 if step.per_step else _gathered_weights(step, narrow)
    lanes = head_values(step, backend) / heads
    shared = sum(map(step.shared_keys, step.reaches)) // len(step.reaches)
    attention = int(lanes * tokens * (2 * heads + 2 * keys) + 2 * shared) * attended
    wide = ((5 if step.rules == "plain" else 2) + _takes(step, DOWN)) * tokens * step.mlp * narrow
    norms = 4 * step.stream * FLOAT32
    if any([axis.name for axis in weight.axes[1:]] == ["head_size"] for weight in step.stacked()):
        norms += tokens * (heads + keys) * (2 * FLOAT32 + narrow)
    attention += narrow * tokens * heads * _takes(step, OUT) if blocked else (FLOAT32 + narrow) * _scores(step)
    halves = 2 if step.norms_after else _takes(step, *QUERY_TO_VALUE) + _takes(step, GATE_OR_UP)
    factors = [each.axes[-1].size for each in step.weights if step.adapts and each.axes[-1].name == LORA_RANK]
    inner = narrow * tokens * sum(-(-rank // backend.lanes) * backend.lanes for rank in factors)
    return weights + attention + halves * stream + 2 * part + wide + inner + norms * (step.rules == "plain")


def _takes(step: StepShape, *factors: tuple[str, str]) -> bool:
    """Return whether the gradient of a trained weight takes an input of products, by the last axes of its factors."""
    return not step.adapts or any((each.axes[-2].name, each.axes[-1].name) in factors for each in step.weights)


def values_of_a_layer(step: StepShape, trained: bool = False) -> int:
    """Return the values of one layer's gathered weights, or trained ones, on a device; the mean, if layers differ."""
    weights = [weight for weight in step.weights if is_stacked(weight)] if trained else step.stacked()
    return sum(step.on_device(weight, step.layout.compute) for weight in weights) // step.layers


def offloaded_bytes(step: StepShape) -> int:
    """Return the bytes that one layer moves to the host's memory for its backward pass."""
    heads = step.tokens * step.heads * step.head_size // step.mesh["model"]
    moved = {"offload": step.stream * (2 if step.splits_stream else 1), "context_offload": heads}
    return moved.get(step.remat, 0) * step.compute_bytes


def _layer(step: StepShape, backend: Backend) -> int:
    """Return the bytes of one layer's backward pass: weights, their gradients, and activations."""
    width = max(step.compute_bytes, backend.narrowest_bytes)
    gathered = 0 if step.per_step else _gathered_weights(step, width)
    experts = sum(step.on_device(each, step.layout.compute) for each in step.weights if is_of_experts(each))
    of_experts = int((1 - EXPERT_GRADIENTS) * experts) // step.layers
    gradients = width * (values_of_a_layer(step, trained=True) - of_experts)
    return gathered + gradients + layer_activations(step, backend)


def _gathered_weights(step: StepShape, width: int) -> int:
    """Return the bytes of one layer's gathered weights on a device; the mean, if layers differ."""
    narrow = [step.on_device(each, step.layout.compute) for each in step.stacked() if in_eight_bits(each, step.matmul)]
    return width * values_of_a_layer(step) - (width - 1) * sum(narrow) // step.layers


def layer_activations(step: StepShape, backend: Backend) -> int:
    """Return the bytes of activations and their gradients in one layer's backward pass, around scores or MLP."""
    width = max(step.compute_bytes, backend.narrowest_bytes)
    scores = _scores(step)
    a_score = FLOAT32 + step.compute_bytes if backend.fuses_softmax else SCORE_ARRAYS * FLOAT32 + 1  # the mask's byte
    attention = a_score * scores
    attention += HEAD_ARRAYS * width * step.tokens * head_values(step, backend)
    attention += KEY_ARRAYS * width * max(map(step.shared_keys, step.reaches))
    a_value = NARROW_MLP_ARRAYS * width + INTEGER_ARRAYS if step.matmul == "int8" else MLP_ARRAYS * width
    a_value -= width * (not _takes(step, DOWN))
    mlp = (a_value + width * _added_outputs(step)) * step.tokens * step.mlp
    if step.exchanged_rows:
        mlp = width * step.exchanged_rows * (SENT_EXPERT_ARRAYS * step.expert_width + SENT_ARRAYS * step.embed)
    elif step.active:
        mlp = width * (EXPERT_ARRAYS * step.tokens * step.mlp + PAIR_ARRAYS * step.pairs * step.embed)
    return width * _stream_values(step, backend) + max(attention, mlp)


def _added_outputs(step: StepShape) -> int:
    """Return the number of adapters whose outputs, of the width of the MLP, exist beside those of frozen weights.

    These are computed again, unless their sums are saved.
    """
    if step.remat in ("none", "projections"):
        return 0
    return sum([axis.name for axis in weight.axes[-2:]] == [LORA_RANK, "mlp"] for weight in step.weights)


def _stream_values(step: StepShape, backend: Backend) -> int:
    """Return a device's values of the arrays of the stream's width in one layer's backward pass."""
    whole, apart = step.tokens * step.embed, 0 if backend.merges_sums else INPUT_GRADIENTS
    if step.splits_stream:
        return (GATHERED_ARRAYS + apart) * whole + (EMBED_ARRAYS - GATHERED_ARRAYS) * step.stream
    return (EMBED_ARRAYS + apart - (FUSED_NORMS if backend.merges_sums else 0)) * whole


def _beside_layers(step: StepShape, backend: Backend) -> int:
    """Return the bytes that exist during the backward pass of each layer.

    These are the weights that were cast before the loop; this microbatch's gradients of all layers, before their
    addition to the buffers; and the head's complete gradient, until its sum over devices is done. A table of several
    groups stays in float32 for the next microbatch.
    """
    cast = backend.narrows_ahead and not step.per_step and step.compute_bytes < FLOAT32
    narrow = step.compute_bytes * sum(step.on_device(each, step.layout.params) for each in step.weights) if cast else 0
    apart, stacked = backend.adds_at_end and step.microbatches > 1, [each for each in step.weights if is_stacked(each)]
    own = FLOAT32 * sum(step.gradient_values(each, backend.lanes) for each in stacked) if apart else 0
    return narrow + own + unsummed_head(step)


def unsummed_head(step: StepShape) -> int:
    """Return the bytes of the head's complete gradient, which exists until its sum over devices is done."""
    width = FLOAT32 if step.loss_blocks.groups > 1 and step.microbatches > 1 else step.compute_bytes
    return width * step.embed * step.vocabulary if step.sums_behind and not step.adapts else 0


def loss_bytes(step: StepShape, backend: Backend) -> int:
    """Return the bytes of the loss: a block's logits, a group's logit gradients, head, gradients of head and stream.

    A separate float32 table sums several groups. A compiler that fuses adds to it in place, without a group's own
    gradient, if the head is no embedding and the table is not added to those of other microbatches. It copies the logit
    gradients of a single group whose rows do not fill whole lanes. One that fuses logits has none of them in float32,
    copies a single group always, and beside the table has the gradient, which the last group writes. A frozen head has
    no gradient, so that nothing is copied for it.
    """
    blocks, head, hidden = step.loss_blocks, step.embed * step.vocabulary, step.tokens * step.embed
    arrays, sent = (FUSED_LOGIT_ARRAYS, step.compute_bytes) if backend.fuses_softmax else (LOGIT_ARRAYS, FLOAT32)
    gathered = 0 if step.per_step or backend.hoists_gathers else step.compute_bytes
    table = FLOAT32 if blocks.groups > 1 else 0
    tied = sum(map(has_vocabulary, step.single())) == 1
    if step.fuses_logits:
        arrays = 0
    elif table and backend.fuses_softmax and not tied and step.microbatches == 1:
        table -= sent
    copies = 2 if blocks.groups == 1 and (step.vocabulary % backend.lanes or step.fuses_logits) else 1
    of_head = table + sent
    if step.adapts:
        copies, of_head = 1, 0
    logits = FLOAT32 * arrays * blocks.block * step.vocabulary + copies * sent * blocks.group * step.vocabulary
    return logits + FLOAT32 * 2 * hidden + (of_head + gathered) * head


SLOTS = 2  # of the window
COPIES = 4  # of the rows in the pipeline, if a stage holds several microbatches: inputs, outputs and both gradients


def estimate_pipeline(
    step: StepShape, pipeline: PipelineShape, arguments: int, backend: Backend, update: int = 0
) -> Estimate:
    """Return the memory of a PSDP step with pipelined layers in closed form; arguments as for `estimate_memory`.

    An iteration differentiates all layers of a stage for one microbatch of the pipeline, so that it holds what each of
    them saves without `remat`. The forward pass keeps the inputs of each iteration.
    """
    apart = step.microbatches > 1
    gradients = FLOAT32 * sum(step.gradient_values(weight, backend.lanes) for weight in step.weights)
    return Estimate(
        arguments=arguments,
        buffers=gradients if apart else 0,
        saved=_kept(step, pipeline, backend),
        tables=_weights(step, pipeline),
        working=max(_iteration(step, pipeline, backend), _loss(step, pipeline, backend)),
        update=update if apart else update + gradients,
    )


def of_an_iteration(step: StepShape, pipeline: PipelineShape) -> StepShape:
    """Return the step with the rows of one iteration: those of a microbatch of the pipeline, of all stages."""
    rows = step.rows * step.mesh["stage"] // pipeline.microbatches
    return replace(step, rows=rows, per_step=True, pipeline=None)


def layers_of_a_stage(step: StepShape, pipeline: PipelineShape) -> int:
    return step.layers // (step.mesh["stage"] * pipeline.repeats)


def _slot(step: StepShape, pipeline: PipelineShape, width: int) -> int:
    """Return the bytes of the gathered weights of one repeat, of a width unless they are in blocks."""
    return layers_of_a_stage(step, pipeline) * _held(step, step.layout.compute, width) // step.layers


def _held(step: StepShape, mapping: AxisMapping, width: int) -> int:
    """Return a device's bytes of the weights of all layers under a mapping, of a width unless they are in blocks."""
    found = 0.0
    for weight in step.stacked():
        held = step.format_of(weight)
        found += step.on_device(weight, mapping) * (width if held is None else held.bytes_per_parameter)
    return int(found)


def _kept(step: StepShape, pipeline: PipelineShape, backend: Backend) -> int:
    """Return the bytes that iterations keep for the backward pass: inputs, and values of each layer by name.

    Of several repeats the backward pass copies those of one.
    """
    one = of_an_iteration(step, pipeline)
    copied = pipeline.microbatches if pipeline.repeats > 1 else 0
    layers = layers_of_a_stage(step, pipeline)
    return (pipeline.iterations + copied) * (_stream(one) + layers * _named(one, backend))


def _stream(one: StepShape) -> int:
    return one.tokens * one.embed * one.compute_bytes


def _named(one: StepShape, backend: Backend) -> int:
    """Return the bytes of a layer's values that `remat` names."""
    return saved_by_layer(one, backend) - _stream(one)


def _weights(step: StepShape, pipeline: PipelineShape) -> int:
    """Return the bytes of the weights of a stage's layers in all repeats, and of their gradients."""
    whole, width = pipeline.gather == "once" and pipeline.repeats > 1, step.compute_bytes
    mapping = step.layout.compute if whole else step.layout.params
    gradients = width * sum(step.on_device(weight, mapping) for weight in step.weights if is_stacked(weight))
    return (_held(step, mapping, width) + gradients) // (step.mesh["stage"] if whole else 1)


def _iteration(step: StepShape, pipeline: PipelineShape, backend: Backend) -> int:
    """Return the bytes of an iteration's backward pass: slots, their gradients, activations, and the head's gradient.

    The backward pass of one of several layers reads gate and up where they are saved. Layers that decode weights save
    what `projections` names.
    """
    width = max(step.compute_bytes, backend.narrowest_bytes)
    one, several = of_an_iteration(step, pipeline), layers_of_a_stage(step, pipeline) > 1
    rows = _stream(step) * (COPIES if pipeline.microbatches > step.mesh["stage"] else 1)
    inner = replace(one, remat="projections" if step.quantised else "none")
    own = saved_by_layer(inner, backend) - _named(one, backend)
    saved = layers_of_a_stage(step, pipeline) * own
    activations = layer_activations(one, backend)
    if several or step.remat == "projections":
        activations -= 2 * width * one.tokens * one.mlp
    inside = saved + activations if several else max(saved, activations)
    decoded = width * sum(step.on_device(weight, step.layout.compute) for weight in step.quantised) // step.layers
    return _in_use(step, pipeline, width) + decoded + rows + inside + unsummed_head(step)


def _in_use(step: StepShape, pipeline: PipelineShape, width: int) -> int:
    """Return the bytes of the weights in use: the slots, their gradients, and that of the iteration.

    The gradient of a single layer is added at once. With one repeat one slot is used. The weights that stages choose
    from the slots are a copy, which counts beside frozen weights; those of trained ones take less than gradients.
    """
    slot, layers = _slot(step, pipeline, width), layers_of_a_stage(step, pipeline)
    gradient = FLOAT32 * layers * values_of_a_layer(step, trained=True)
    apart = gradient if layers > 1 else 0
    if pipeline.gather == "per_iteration":
        return slot + apart
    chosen = slot if step.adapts else 0
    return chosen + (slot + gradient if pipeline.repeats == 1 else SLOTS * (slot + gradient) + apart)


def _loss(step: StepShape, pipeline: PipelineShape, backend: Backend) -> int:
    """Return the bytes of the loss, with the last slot, which the backward pass begins with."""
    cast = [] if step.adapts else step.single()
    single = step.compute_bytes * sum(step.on_device(weight, step.layout.params) for weight in cast)
    slot = 0 if pipeline.gather == "per_iteration" else _slot(step, pipeline, step.compute_bytes)
    return loss_bytes(step, backend) + slot + single


@cache
def compared_steps() -> dict[str, dict[str, Any]]:
    """Return the steps by name."""
    return json.loads(files("gregale.cost").joinpath("compared.json").read_text(encoding="utf-8"))


def kind_of(step: StepShape) -> str:
    """Return the properties that closed forms treat apart: policy, gather, numbers, attention, windows, others."""
    words = [step.remat, "per_step" if step.per_step else "per_layer", step.matmul]
    words += ["scores" if step.scores else "kernel", f"{len(set(step.windows))} windows"]
    words += ["experts"] * (step.active > 0) + ["adapters"] * step.adapts
    return " ".join(words + [axis for axis, size in step.mesh.items() if size > 1 and axis not in ("replica", "data")])


def sizes_of(step: StepShape) -> list[int]:
    """Return layers, width, vocabulary, tokens of a device, microbatches, and bytes of a value."""
    return [step.layers, step.embed, step.vocabulary, step.tokens, step.microbatches, step.compute_bytes]


def is_compared(step: StepShape, backend: Backend) -> bool:
    """Return whether each size of a step lies between those of compared steps of its kind."""
    columns = zip(*(each["sizes"] for each in compared_steps().values() if each["kind"] == kind_of(step)), strict=True)
    between = [min(column) <= size <= max(column) for column, size in zip(columns, sizes_of(step), strict=False)]
    return backend == TPU and bool(between) and all(between)
