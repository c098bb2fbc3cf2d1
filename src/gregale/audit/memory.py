"""Provides the memory of a step on one device: the compiler's report, and an estimate in closed form."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from gregale.audit.step import Backend, StepShape, has_vocabulary, in_eight_bits, is_of_experts, is_stacked
from gregale.axes.layout import LORA_RANK, Tree

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
