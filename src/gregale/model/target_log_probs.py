"""The log-likelihood of each target, computed in blocks of tokens so that the full logits are never in memory."""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from gregale.axes.layout import Layout
from gregale.model.execution import Execution
from gregale.model.kernels.reference import capped
from gregale.model.loss import HeadLoss, gradients_of_head
from gregale.model.losses import Logits


def target_scores(
    hidden: NamedArray,
    head: NamedArray,
    targets: NamedArray,
    vocabulary: int | None,
    execution: Execution,
    cap: float | None = None,
) -> tuple[NamedArray, NamedArray]:
    """Return log softmax(hidden . head)[target], float32, and whether it is the likeliest token: [batch, position].

    Of tokens that are equally likely the first is the likeliest. Written per device like `next_token_loss`: a device's
    tokens pass through the head in blocks of `execution.loss_block`, with the vocabulary split over `model`; four
    numbers a token are sent over `model`. Gradients compute the blocks again, as those of `next_token_loss` with minus
    the cotangents as weights.

    - `hidden`: [batch, position, embed]
    - `head`: [embed, vocab], gathered over `data`
    - `targets`: [batch, position], integers in [0, vocabulary)
    - `vocabulary`: the number of first columns of the head that are tokens; the others have the probability 0;
      None: all are tokens
    - `cap`: the limit of the logits, by tanh; None: no limit
    """
    Embed, Vocab = head.axes
    hidden = hidden.rearrange((..., Embed))
    tokens = hidden.axes[:-1]
    layout = execution.layout
    fused = execution.fused_logits and layout.devices((Vocab,), layout.compute) == 1
    spec = HeadLoss(tokens, Embed, Vocab, layout, execution.loss_block, Logits(cap, vocabulary), fused)
    arrays = hidden.array, head.array, targets.rearrange(tokens).array
    scores, likeliest = cast(tuple[jax.Array, jax.Array], _scores(spec, *arrays))
    names = tuple(axis.name for axis in tokens)
    return NamedArray(scores, names), NamedArray(likeliest, names)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(spec: HeadLoss, hidden, head, targets):
    return _of_devices(spec, hidden, head, targets)


def _of_devices(spec: HeadLoss, hidden, head, targets):
    layout = spec.layout
    by_token = layout.spec(spec.tokens, layout.compute)
    arrays = (*spec.tokens, spec.Embed), (spec.Embed, spec.Vocab)
    in_specs = (*(layout.spec(axes, layout.compute) for axes in arrays), by_token)
    score = HeadScores(spec.Vocab, spec.logits.rows or spec.Vocab.size, layout, spec.block, spec.logits.cap)
    return layout.shard_map(score, in_specs, (by_token, by_token))(hidden, head, targets)


def _scores_forward(spec: HeadLoss, hidden, head, targets):
    return _of_devices(spec, hidden, head, targets), (hidden, head, targets)


def _scores_backward(spec: HeadLoss, saved, cotangents):
    hidden, head, targets = saved
    return *gradients_of_head(spec, hidden, head, targets, weights=-cotangents[0]), None


_scores.defvjp(_scores_forward, _scores_backward)


@dataclass(frozen=True)
class HeadScores:
    """The computation of one device."""

    Vocab: Axis
    vocabulary: int  # columns of the whole head that are tokens
    layout: Layout
    block: int  # tokens whose logits are in memory at a time
    cap: float | None = None

    def __call__(self, hidden: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Map [batch, position, embed], [embed, vocab shard], [batch, position] to [batch, position] twice."""
        count = targets.size
        size = min(self.block, count)
        blocks = -(-count // size)

        def cut(x: jax.Array) -> jax.Array:
            filled = jnp.pad(x, [(0, blocks * size - count)] + [(0, 0)] * (x.ndim - 1))
            return filled.reshape(blocks, size, *x.shape[1:])

        def whole(x: jax.Array) -> jax.Array:
            return x.reshape(-1)[:count].reshape(targets.shape)

        parts = cut(hidden.reshape(count, -1)), cut(targets.reshape(-1))
        scores, likeliest = jax.lax.map(lambda part: self.of_block(part[0], head, part[1]), parts)
        return whole(scores), whole(likeliest)

    def of_block(self, hidden: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the log-likelihood and whether it is the likeliest, [block] each."""
        axes, width = self.layout.mesh_axes((self.Vocab,), self.layout.compute), head.shape[1]
        logits = capped(jnp.dot(hidden, head, preferred_element_type=jnp.float32), self.cap)
        first: Any = jax.lax.axis_index(axes) * width if axes else 0
        columns = first + jnp.arange(width)
        logits = jnp.where(columns < self.vocabulary, logits, -jnp.inf)
        own_top, own_index = jnp.max(logits, axis=-1), first + jnp.argmax(logits, axis=-1)
        top = jax.lax.pmax(own_top, axes) if axes else own_top
        index = jnp.where(own_top == top, own_index, self.Vocab.size)  # NaN has no index
        index = jax.lax.pmin(index, axes) if axes else index
        at_target = jnp.where(targets[:, None] == columns, logits, 0)
        sums = (jnp.exp(logits - top[:, None]).sum(-1), at_target.sum(-1))
        total, at_target = jax.lax.psum(sums, axes) if axes else sums
        return at_target - top - jnp.log(total), index == targets
