"""Memory of a step on one device: what the compiler says, and an estimate in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from gregale.audit.step import Backend, StepShape

Tree = Any
FLOAT32 = 4
SCORE_ARRAYS = 4  # the backward pass of softmax(scores) holds scores, probabilities and both gradients
HEAD_ARRAYS = 8  # query, key, value and the attention's output, each with its gradient
MLP_ARRAYS = 6  # gate, up and their product, each with its gradient
EMBED_ARRAYS = 7  # the residual stream, both norms and both outputs, and gradients of the last two
INPUT_GRADIENTS = 5  # by query, key, value, gate and up apart, where the compiler does not add them up first
LOGIT_ARRAYS = 3  # logits, exponentials and their gradient


@dataclass(frozen=True)
class CompilerMemory:
    """Bytes on one device as the compiler has planned them.

    `peak` is the compiler's own, and else arguments + results + temporaries, less the results that are written over
    arguments: a bound, for not all of them are there at once.
    """

    arguments: int
    results: int
    temporaries: int
    aliased: int
    told_peak: int | None = None

    @property
    def peak(self) -> int:
        if self.told_peak is not None:
            return self.told_peak
        return self.arguments + self.results + self.temporaries - self.aliased


def compiler_memory(compiled: jax.stages.Compiled, tells_peak: bool = False) -> CompilerMemory:
    """What the compiler says of a program.

    - `tells_peak`: its peak is to be believed; XLA:CPU leaves the temporaries out of it
    """
    found: Any = compiled.memory_analysis()
    return CompilerMemory(
        arguments=found.argument_size_in_bytes,
        results=found.output_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        told_peak=found.peak_memory_in_bytes if tells_peak else None,
    )


def bytes_on_device(tree: Tree) -> int:
    """Bytes of a tree of `ShapeDtypeStruct`s with shardings on one device."""
    return sum(
        prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None
    )


@dataclass(frozen=True)
class Estimate:
    """The closed form, in bytes on one device.

    Attributes:
        arguments: parameters, optimizer state and batch.
        buffers: gradients summed over microbatches.
        saved: what layers keep for the backward pass.
        tables: embedding and head, as far as they are gathered; with `per_step` all weights.
        working: the largest set that is alive at once beside them: one layer's backward pass, or the loss.
        update: what the optimizer takes beside the buffers, when all that was there for the gradients is gone.
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
    """Memory of a PSDP step in closed form; `arguments` are the bytes of state and batch on one device.

    The peak is in the backward pass of a layer, or in the loss if the vocabulary is large, or in the optimizer if that
    needs whole matrices: it takes `update` beside the updates. Attention that is no kernel is taken as what XLA makes
    of it by itself: scores are held for all heads of a microbatch.
    """
    buffers = FLOAT32 * sum(step.on_device(weight, step.layout.params) for weight in step.weights)
    gathered = step.weights if step.per_step else [each for each in step.single() if step.uses(each)]
    # A compiler that widens bfloat16 keeps both forms of what it gathered before the loop.
    copies = step.compute_bytes + (backend.narrowest_bytes if backend.narrowest_bytes > step.compute_bytes else 0)
    return Estimate(
        arguments=arguments,
        buffers=buffers,
        saved=step.layers * _saved_values(step) * step.compute_bytes,
        tables=copies * sum(step.on_device(weight, step.layout.compute) for weight in gathered),
        working=max(_layer(step, backend), _loss(step, backend)),
        update=update,
    )


def _scores(step: StepShape) -> int:
    """Attention scores of one layer on one device: [rows, heads, position, position]; a kernel holds none."""
    if not step.scores:
        return 0
    return step.tokens * step.positions * step.heads // step.mesh["model"]


def _saved_values(step: StepShape) -> int:
    """Values that one layer saves for its backward pass."""
    tokens, heads = step.tokens, step.heads * step.head_size // step.mesh["model"]
    carry = tokens * step.embed
    match step.remat:
        case "full" | "context_offload":
            return carry
        case "offload":
            return 0
        case "context":
            return carry + tokens * heads
        case "projections":
            return carry + tokens * (4 * heads + 2 * step.mlp + 2 * step.embed)
    return 3 * carry + tokens * (5 * heads + 4 * step.mlp) + 2 * _scores(step)


def _layer(step: StepShape, backend: Backend) -> int:
    """The backward pass of one layer: its weights, their gradients, and the activations around scores or MLP."""
    width = max(step.compute_bytes, backend.narrowest_bytes)
    weights = sum(step.on_device(weight, step.layout.compute) for weight in step.stacked()) // step.layers
    scores = _scores(step)
    attention = SCORE_ARRAYS * FLOAT32 * scores + scores  # and the mask, a byte each
    attention += HEAD_ARRAYS * width * step.tokens * step.heads * step.head_size // step.mesh["model"]
    mlp = MLP_ARRAYS * width * step.tokens * step.mlp
    stream = EMBED_ARRAYS if backend.merges_sums else EMBED_ARRAYS + INPUT_GRADIENTS
    gathered = 0 if step.per_step else width * weights
    return gathered + width * weights + stream * width * step.tokens * step.embed + max(attention, mlp)


def _loss(step: StepShape, backend: Backend) -> int:
    """The loss: a block's logits, a group's gradients by them, the head's gradient, that of the hidden state.

    Several groups are added up in a table of their own.
    """
    blocks, width = step.loss_blocks, max(step.compute_bytes, backend.narrowest_bytes)
    head = step.embed * step.vocabulary
    logits = FLOAT32 * LOGIT_ARRAYS * blocks.block * step.vocabulary + width * blocks.group * step.vocabulary
    table = FLOAT32 * head if blocks.groups > 1 else 0
    return logits + table + width * head + FLOAT32 * 2 * step.tokens * step.embed
