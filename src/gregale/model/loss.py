"""The next-token loss, computed in blocks of tokens so that the full logits are never in memory."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec

from gregale.axes.gather import scattered
from gregale.axes.layout import Layout
from gregale.axes.vocabulary import loss_blocks
from gregale.model.config import Logits
from gregale.model.execution import Execution
from gregale.model.kernels.reference import capped

ALL = Logits()


def next_token_loss(
    hidden: NamedArray,
    head: NamedArray,
    targets: NamedArray,
    weights: NamedArray,
    execution: Execution,
    logits: Logits = ALL,
) -> jax.Array:
    """Return the sum over tokens of weight * -log softmax(logits)[target] with logits = hidden . head, a float32
    scalar.

    Written per device in `jax.shard_map`: a device's tokens pass through the head in blocks of `execution.loss_block`,
    with the vocabulary split over `model`. If gradients are needed, the same pass computes those by the logits of each
    block. They stay in the compute dtype for a group of blocks, see `axes.vocabulary.loss_blocks`; then two products
    give the gradients by `hidden` and by `head`. So logits are computed once, only one block's are in memory in
    float32, and the head's gradient is not read and written for each block. The transfers are three numbers a token
    over `model` for the softmax, the gradient of `hidden` over `model` and that of `head` over `data`, once each;
    nothing over `replica`.

    - `hidden`: [batch, position, embed]
    - `head`: [embed, vocab], gathered over `data`
    - `targets`: [batch, position], integers in [0, vocab)
    - `weights`: [batch, position], float; 0 leaves a token out
    - `logits`: the treatment of hidden . head
    """
    Embed, Vocab = head.axes
    hidden = hidden.rearrange((..., Embed))
    tokens = hidden.axes[:-1]
    head_loss = HeadLoss(tokens, Embed, Vocab, execution.layout, execution.loss_block, logits)
    return _loss(head_loss, hidden.array, head.array, targets.rearrange(tokens).array, weights.rearrange(tokens).array)


@dataclass(frozen=True)
class HeadLoss:
    """The shapes and shardings of one call of `next_token_loss`."""

    tokens: tuple[Axis, ...]
    Embed: Axis
    Vocab: Axis
    layout: Layout
    block: int
    logits: Logits = ALL

    @property
    def token_mesh_axes(self) -> tuple[str, ...]:
        return self.layout.mesh_axes(self.tokens, self.layout.compute)

    @property
    def vocab_mesh_axes(self) -> tuple[str, ...]:
        return self.layout.mesh_axes((self.Vocab,), self.layout.compute)

    def sharded(self, function, out_specs):
        """Run `function(hidden, head, targets, weights)` on each device."""
        layout = self.layout
        tokens = layout.spec(self.tokens, layout.compute)
        hidden = layout.spec((*self.tokens, self.Embed), layout.compute)
        head = layout.spec((self.Embed, self.Vocab), layout.compute)
        return layout.shard_map(function, (hidden, head, tokens, tokens), out_specs)

    def cut(self, hidden, targets, weights):
        """Return a device's tokens: [groups, blocks, block, embed], twice [groups, blocks, block]; padding weighs 0."""
        count = targets.size
        blocks = loss_blocks(count, self.Embed.size, hidden.dtype.itemsize, self.block)

        def cut(x):
            filled = jnp.pad(x, [(0, blocks.tokens - count)] + [(0, 0)] * (x.ndim - 1))
            return filled.reshape(*blocks, *x.shape[1:])

        return cut(hidden.reshape(-1, self.Embed.size)), cut(targets.reshape(-1)), cut(weights.reshape(-1))

    def of_block(self, hidden, head, targets, weights):
        """Return the loss of one block and its gradient by hidden . head: scalar, [block, vocab shard], float32."""
        axes = self.vocab_mesh_axes
        cap, rows = self.logits
        bounded = capped(jnp.dot(hidden, head, preferred_element_type=jnp.float32), cap)
        first = jax.lax.axis_index(axes) * head.shape[1] if axes else 0
        logits = bounded if rows is None else jnp.where(first + jnp.arange(head.shape[1]) < rows, bounded, -jnp.inf)
        top = jnp.max(logits, axis=-1)
        top = jax.lax.pmax(top, axes) if axes else top
        is_target = (targets[:, None] - first) == jnp.arange(head.shape[1])
        exponentials = jnp.exp(logits - top[:, None])
        sums = (exponentials.sum(-1), jnp.where(is_target, logits, 0).sum(-1))
        total, at_target = jax.lax.psum(sums, axes) if axes else sums
        loss = jnp.sum(weights * (jnp.log(total) + top - at_target))
        by_logits = exponentials * (weights / total)[:, None] - jnp.where(is_target, weights[:, None], 0)
        return loss, by_logits if cap is None else by_logits * (1 - jnp.square(bounded / cap))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(spec: HeadLoss, hidden, head, targets, weights):
    def local(hidden, head, targets, weights):
        def step(loss, block):
            return loss + spec.of_block(block[0], head, *block[1:])[0], None

        blocks = [x.reshape(-1, *x.shape[2:]) for x in spec.cut(hidden, targets, weights)]
        loss, _ = jax.lax.scan(step, jnp.float32(0), blocks)
        return jax.lax.psum(loss, spec.token_mesh_axes)

    return spec.sharded(local, PartitionSpec())(hidden, head, targets, weights)


def _loss_forward(spec: HeadLoss, hidden, head, targets, weights):
    def local(hidden, head, targets, weights):
        def block(loss, rows):
            block_loss, by_logits = spec.of_block(rows[0], head, *rows[1:])
            return loss + block_loss, by_logits.astype(head.dtype)

        def group(carry, rows):
            loss, by_head = carry
            loss, by_logits = jax.lax.scan(block, loss, rows)
            by_logits = by_logits.reshape(-1, by_logits.shape[-1])
            by_hidden = jnp.dot(by_logits, head.T, preferred_element_type=jnp.float32).astype(hidden.dtype)
            # In this order the gathered head is not needed any more when its gradient is computed.
            by_hidden, by_logits = jax.lax.optimization_barrier((by_hidden, by_logits))
            tokens = rows[0].reshape(-1, spec.Embed.size)
            by_head += jnp.dot(tokens.T, by_logits, preferred_element_type=jnp.float32)
            return (loss, by_head), by_hidden

        start = (jnp.float32(0), jnp.zeros(head.shape, jnp.float32))
        (loss, by_head), by_hidden = jax.lax.scan(group, start, spec.cut(hidden, targets, weights))
        by_hidden = by_hidden.reshape(-1, hidden.shape[-1])[: targets.size].reshape(hidden.shape)
        by_hidden = jax.lax.psum(by_hidden, spec.vocab_mesh_axes)
        by_head = scattered(by_head.astype(head.dtype), (spec.Embed, spec.Vocab), spec.token_mesh_axes, spec.layout)
        return jax.lax.psum(loss, spec.token_mesh_axes), by_hidden, by_head

    layout = spec.layout
    hidden_spec = layout.spec((*spec.tokens, spec.Embed), layout.compute)
    head_spec = layout.spec((spec.Embed, spec.Vocab), layout.params)
    outputs = spec.sharded(local, (PartitionSpec(), hidden_spec, head_spec))(hidden, head, targets, weights)
    loss, by_hidden, by_head = outputs
    return loss, (by_hidden, by_head, weights)


def _loss_backward(spec: HeadLoss, saved, cotangent):
    by_hidden, by_head, weights = saved
    scaled = [(gradient * cotangent).astype(gradient.dtype) for gradient in (by_hidden, by_head)]
    return *scaled, None, jnp.zeros_like(weights)


_loss.defvjp(_loss_forward, _loss_backward)
