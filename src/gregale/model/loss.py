"""The next-token loss and each target's log-likelihood, in blocks of tokens: the full logits are never in memory."""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import cast

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec

from gregale.axes.gather import scattered
from gregale.axes.layout import Layout, unmapped_if_one
from gregale.axes.parameters import loss_blocks
from gregale.model.execution import Execution
from gregale.model.kernels.operations import capped
from gregale.model.losses import Logits
from gregale.scopes import AGAIN

ALL = Logits()
SAMPLE = 128  # columns of the head whose mean logit predicts the size of a row's logits
RANGE = (1e-20, 1e20)  # sums of exponentials whose terms and inverses are far from both ends of float32
RAISED = 40.0  # of the shift above that mean


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

    See `losses_of_head`, whose z-loss it leaves out.
    """
    return losses_of_head(hidden, head, targets, weights, execution, logits._replace(z_loss=0.0))[0]


def losses_of_head(
    hidden: NamedArray, head: NamedArray, targets: NamedArray, weights: NamedArray, execution: Execution, logits: Logits
) -> tuple[jax.Array, jax.Array]:
    """Return `next_token_loss` and the z-loss, of which only the sum has gradients: float32 scalars.

        z-loss = logits.z_loss * sum over tokens of weight * logsumexp(logits)^2

    Written per device in `jax.shard_map`: a device's tokens pass through the head in blocks of `execution.loss_block`,
    with the vocabulary split over `model`. If gradients are needed, the same pass computes those by the logits of each
    block. They stay in the compute dtype for a group of blocks, see `axes.vocabulary.loss_blocks`; then two products
    give the gradients by `hidden` and by `head`. So logits are computed once, only one block's are in memory in
    float32, and the head's gradient is not read and written for each block. The transfers are three numbers a token
    over `model` for the softmax, the gradient of `hidden` over `model` and that of `head` over `data`, once each;
    nothing over `replica`.

    With `execution.fused_logits`, a device that has the whole vocabulary computes a group as one block. Its logits are
    in memory only as exponentials in the compute dtype, see `_fused_group`.

    - `hidden`: [batch, position, embed]
    - `head`: [embed, vocab], gathered over `data`
    - `targets`: [batch, position], integers in [0, vocab)
    - `weights`: [batch, position], float; 0 leaves a token out
    - `logits`: the treatment of hidden . head
    """
    spec, arrays = HeadLoss.of(hidden, head, execution, logits, targets, weights)
    total, z_loss = cast(tuple[jax.Array, jax.Array], _loss(spec, *arrays))
    return total - z_loss, z_loss


@dataclass(frozen=True)
class HeadLoss:
    """The shapes and shardings of one call of `next_token_loss` or `target_scores`."""

    tokens: tuple[Axis, ...]
    Embed: Axis
    Vocab: Axis
    layout: Layout
    block: int
    logits: Logits = ALL
    fused: bool = False

    @staticmethod
    def of(
        hidden: NamedArray, head: NamedArray, execution: Execution, logits: Logits, *by_token: NamedArray
    ) -> tuple["HeadLoss", tuple[jax.Array, ...]]:
        """Return a call's shapes, and its arrays in the order of their axes."""
        Embed, Vocab = head.axes
        hidden = hidden.rearrange((..., Embed))
        tokens, layout = hidden.axes[:-1], execution.layout
        fused = execution.fused_logits and layout.devices((Vocab,), layout.compute) == 1
        spec = HeadLoss(tokens, Embed, Vocab, layout, execution.loss_block, logits, fused)
        return spec, (hidden.array, head.array, *(each.rearrange(tokens).array for each in by_token))

    @property
    def token_mesh_axes(self) -> tuple[str, ...]:
        return self.layout.mesh_axes(self.tokens, self.layout.compute)

    @property
    def vocab_mesh_axes(self) -> tuple[str, ...]:
        return self.layout.mesh_axes((self.Vocab,), self.layout.compute)

    def sharded(self, function, out_specs, hidden, head, *by_token):
        """Run `function(hidden, head, *by_token)` on each device."""
        arrays = (*self.tokens, self.Embed), (self.Embed, self.Vocab), *(self.tokens for _ in by_token)
        in_specs = tuple(self.layout.spec(axes, self.layout.compute) for axes in arrays)
        return self.layout.shard_map(function, in_specs, out_specs)(hidden, head, *by_token)

    def cut(self, blocks, hidden, *by_token):
        """Return a device's tokens, padded with zeros: [*blocks, embed], and [*blocks] of each other array."""
        tokens, count = prod(blocks), by_token[0].size

        def cut(x):
            return jnp.pad(x, [(0, tokens - count)] + [(0, 0)] * (x.ndim - 1)).reshape(*blocks, *x.shape[1:])

        return cut(hidden.reshape(count, -1)), *(cut(x.reshape(-1)) for x in by_token)

    def groups(self, fused, hidden, *by_token):
        """Return a device's tokens as [groups, blocks, block, ...], see `cut`."""
        sizes = by_token[0].size, self.Embed.size, hidden.dtype.itemsize, self.block
        return self.cut(loss_blocks(*sizes, fused), hidden, *by_token)

    def first_of_device(self, head):
        """Return the first column of the whole head that this device has."""
        axes = self.vocab_mesh_axes
        return jax.lax.axis_index(axes) * head.shape[1] if axes else 0

    def of_device(self, head):
        """Return the columns of the whole head that this device has: [vocab shard]."""
        return self.first_of_device(head) + jnp.arange(head.shape[1])

    def bounded(self, hidden, head):
        """Return hidden . head under the cap: float32 [block, vocab shard]."""
        return capped(_product(hidden, head), self.logits.cap)

    def only_tokens(self, logits, head):
        """Return the logits, -inf where the row of the head is padding."""
        rows = self.logits.rows
        return logits if rows is None else jnp.where(self.of_device(head) < rows, logits, -jnp.inf)

    def slope(self, logits):
        """Return the derivative of the cap by what it bounds, from its result; 1 without a cap."""
        return 1 if self.logits.cap is None else 1 - jnp.square(logits / self.logits.cap)

    def sums(self, log_total, at_target, weights):
        """Return a block's loss and its part that is z-loss, [2], and the factors of the gradient's softmax, [block].

        - `log_total`: logsumexp of the logits; `at_target`: the logits of targets
        """
        z = self.logits.z_loss
        z_loss = jnp.sum(weights * jnp.square(log_total)) * z if z else jnp.float32(0)
        loss = jnp.sum(weights * (log_total - at_target)) + z_loss
        return jnp.stack([loss, z_loss]), weights * (1 + 2 * z * log_total) if z else weights

    def softmax(self, logits, head, targets):
        """Return exp(logits - top) and the places of targets, [block, vocab shard]; and of each row, over all devices,
        the largest logit `top`, the sum of the exponentials and the target's logit: [block]."""
        top, axes = jnp.max(logits, axis=-1), self.vocab_mesh_axes
        top = jax.lax.pmax(top, axes) if axes else top
        is_target = targets[:, None] == self.of_device(head)
        exponentials = jnp.exp(logits - top[:, None])
        sums = (exponentials.sum(-1), jnp.where(is_target, logits, 0).sum(-1))
        return exponentials, is_target, top, *(jax.lax.psum(sums, axes) if axes else sums)

    def of_block(self, hidden, head, targets, weights):
        """Return the losses of one block and their gradient by hidden . head: [2], [block, vocab shard], float32."""
        bounded = self.bounded(hidden, head)
        logits = self.only_tokens(bounded, head)
        exponentials, is_target, top, total, at_target = self.softmax(logits, head, targets)
        losses, factors = self.sums(jnp.log(total) + top, at_target, weights)
        by_logits = exponentials * (factors / total)[:, None] - jnp.where(is_target, weights[:, None], 0)
        return losses, by_logits * self.slope(bounded)

    def scores_of_block(self, hidden, head, targets):
        """Return the log-likelihood of each target and whether it is the likeliest token, [block] each."""
        bounded, axes = self.bounded(hidden, head), self.vocab_mesh_axes
        logits = jnp.where(self.of_device(head) < (self.logits.rows or self.Vocab.size), bounded, -jnp.inf)
        _, _, top, total, at_target = self.softmax(logits, head, targets)
        index = self.first_of_device(head) + jnp.argmax(logits, axis=-1)
        index = jnp.where(jnp.max(logits, axis=-1) == top, index, self.Vocab.size)
        index = jax.lax.pmin(index, axes) if axes else index  # NaN has no index
        return at_target - top - jnp.log(total), index == targets

    def exponentials(self, hidden, head, targets, shift):
        """Return exp(logits - shift) by the slope of the cap, and of each row the sum of exponentials and the target's
        logit: [block, vocab shard] in the compute dtype, [block] twice in float32."""
        bounded = self.bounded(hidden, head)
        exponentials = jnp.exp(self.only_tokens(bounded, head) - shift[:, None])
        at_target = jnp.where(targets[:, None] == self.of_device(head), bounded, 0).sum(-1)
        return (exponentials * self.slope(bounded)).astype(head.dtype), exponentials.sum(-1), at_target

    def typical(self, hidden, head):
        """Return a number a row near its logits, from the mean of the first columns: [block].

        The sum of exponentials is at least that of these columns, and so, by their convexity, at least their number
        times exp(mean). `RAISED` above the mean, it has the same distance to both ends of `RANGE`.
        """
        return self.bounded(hidden, head[:, :SAMPLE]).mean(-1) + RAISED

    def finite_exponentials(self, hidden, head, targets):
        """Return `exponentials` and the shift that they have: `typical`, or the largest logit if a sum is out of range.

        Out of range is a row whose log-sum-exp is more than 86 above the mean of its first logits, or padded columns
        among these: the product runs twice more for the group.
        """
        shift = self.typical(hidden, head)

        def in_range(total):
            return jnp.all((total > RANGE[0]) & (total < RANGE[1]))

        def again(state):
            # A product that does not depend on the state would be moved out of the loop, where it always runs.
            own = jnp.where(state[0], 0, hidden)
            top = self.only_tokens(self.bounded(own, head), head).max(-1)
            own, top = jax.lax.optimization_barrier((own, top))
            return (jnp.bool_(True), top, *self.exponentials(own, head, targets, top))

        state = (jnp.bool_(False), shift, *self.exponentials(hidden, head, targets, shift))
        with jax.named_scope(AGAIN):
            return jax.lax.while_loop(lambda state: ~(state[0] | in_range(state[3])), again, state)[1:]


def _product(left, right):
    return jnp.dot(left, right, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(spec: HeadLoss, hidden, head, targets, weights):
    def local(hidden, head, targets, weights):
        def step(losses, block):
            return losses + spec.of_block(block[0], head, *block[1:])[0], None

        blocks = [x.reshape(-1, *x.shape[2:]) for x in spec.groups(False, hidden, targets, weights)]
        losses, _ = jax.lax.scan(step, jnp.zeros(2), blocks)
        return _over_tokens(spec, losses)

    return spec.sharded(local, (PartitionSpec(), PartitionSpec()), hidden, head, targets, weights)


def _over_tokens(spec: HeadLoss, losses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sums of a device's losses [2] over all tokens."""
    if not spec.logits.z_loss:
        return jax.lax.psum(losses[0], spec.token_mesh_axes), jnp.float32(0)
    loss, z_loss = jax.lax.psum(losses, spec.token_mesh_axes)
    return loss, z_loss


def _blocked_group(spec: HeadLoss, head, hidden, targets, weights):
    """Return a group's losses [2], their gradient by hidden, and two factors of that by head: left.T . right."""

    def block(losses, rows):
        of_block, by_logits = spec.of_block(rows[0], head, *rows[1:])
        return losses + of_block, by_logits.astype(head.dtype)

    losses, by_logits = jax.lax.scan(block, jnp.zeros(2), (hidden, targets, weights))
    by_logits = by_logits.reshape(-1, by_logits.shape[-1])
    by_hidden = _product(by_logits, head.T).astype(hidden.dtype)
    # In this order the gathered head is not needed any more when its gradient is computed.
    by_hidden, by_logits = jax.lax.optimization_barrier((by_hidden, by_logits))
    return losses, by_hidden, (hidden.reshape(-1, spec.Embed.size), by_logits)


def _fused_group(spec: HeadLoss, head, hidden, targets, weights):
    """Return the same for a compiler that computes what follows and precedes a product with the product's blocks.

    The first product writes the exponentials, relative to a number that is known before it, and sums them. The two
    others take them divided by the sum, with the target's term in its place.
    """
    hidden, targets, weights = hidden[0], targets[0], weights[0]
    shift, exponentials, total, at_target = spec.finite_exponentials(hidden, head, targets)
    losses, factors = spec.sums(jnp.log(total) + shift, at_target, weights)
    scale = factors / total
    at_target = (jnp.exp(at_target - shift) * scale - weights) * spec.slope(at_target)

    def by_logits(exponentials, targets, scale, at_target):
        is_target = targets[:, None] == spec.of_device(head)
        return jnp.where(is_target, at_target[:, None], exponentials * scale[:, None]).astype(head.dtype)

    parts = exponentials, targets, scale, at_target
    by_hidden = _product(by_logits(*parts), head.T).astype(hidden.dtype)
    # The barrier keeps both products with an operand of their own, which is computed with it and never written.
    by_hidden, *parts = jax.lax.optimization_barrier((by_hidden, *parts))
    return losses, by_hidden, (hidden, by_logits(*parts))


def _loss_forward(spec: HeadLoss, hidden, head, targets, weights):
    of_group = _fused_group if spec.fused else _blocked_group

    def local(hidden, head, targets, weights):
        def group(index, carry):
            """Add a group to losses and gradient by head; its gradient by hidden takes the place of its tokens."""
            losses, by_head, tokens = carry
            rows = [jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in (tokens, *others)]
            of_rows, own, (left, right) = of_group(spec, head, *rows)
            by_head = _product(left.T, right) if by_head is None else by_head + _product(left.T, right)
            tokens = jax.lax.dynamic_update_index_in_dim(tokens, own.reshape(rows[0].shape), index, 0)
            return losses + of_rows, by_head, tokens

        tokens, *others = spec.groups(spec.fused, hidden, targets, weights)
        last = len(tokens) - 1
        carry = jnp.zeros(2), jnp.zeros(head.shape, jnp.float32) if last else None, tokens
        # The last group is apart, so that its product writes the gradient by head in the compute dtype.
        losses, by_head, by_hidden = group(last, jax.lax.fori_loop(0, last, group, carry) if last else carry)
        by_hidden = by_hidden.reshape(-1, hidden.shape[-1])[: targets.size].reshape(hidden.shape)
        by_hidden = jax.lax.psum(by_hidden, spec.vocab_mesh_axes)
        by_head = scattered(by_head.astype(head.dtype), (spec.Embed, spec.Vocab), spec.token_mesh_axes, spec.layout)
        return *_over_tokens(spec, losses), by_hidden, by_head

    local, layout = unmapped_if_one(local), spec.layout
    hidden_spec = layout.spec((*spec.tokens, spec.Embed), layout.compute)
    head_spec = layout.spec((spec.Embed, spec.Vocab), layout.params)
    outputs = PartitionSpec(), PartitionSpec(), hidden_spec, head_spec
    *losses, by_hidden, by_head = spec.sharded(local, outputs, hidden, head, targets, weights)
    return tuple(losses), (by_hidden, by_head, weights)


def _loss_backward(spec: HeadLoss, saved, cotangents):
    by_hidden, by_head, weights = saved
    scaled = [(gradient * cotangents[0]).astype(gradient.dtype) for gradient in (by_hidden, by_head)]
    return *scaled, None, jnp.zeros_like(weights)


_loss.defvjp(_loss_forward, _loss_backward)


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
    spec, arrays = HeadLoss.of(hidden, head, execution, Logits(cap, vocabulary), targets)
    names = tuple(axis.name for axis in spec.tokens)
    scores, likeliest = cast(tuple[jax.Array, jax.Array], _scores(spec, *arrays))
    return NamedArray(scores, names), NamedArray(likeliest, names)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(spec: HeadLoss, hidden, head, targets):
    def local(hidden, head, targets):
        size = min(spec.block, targets.size)
        blocks = spec.cut((-(-targets.size // size), size), hidden, targets)
        found = jax.lax.map(lambda block: spec.scores_of_block(block[0], head, block[1]), blocks)
        return tuple(x.reshape(-1)[: targets.size].reshape(targets.shape) for x in found)

    by_token = spec.layout.spec(spec.tokens, spec.layout.compute)
    return spec.sharded(local, (by_token, by_token), hidden, head, targets)


def _scores_forward(spec: HeadLoss, hidden, head, targets):
    return _scores(spec, hidden, head, targets), (hidden, head, targets)


def _scores_backward(spec: HeadLoss, saved, cotangents):
    hidden, head, targets = saved
    by_hidden, by_head, _ = _loss_forward(spec, hidden, head, targets, -cotangents[0])[1]
    return by_hidden, by_head, None


_scores.defvjp(_scores_forward, _scores_backward)
