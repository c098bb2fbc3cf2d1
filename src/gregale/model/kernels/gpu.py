"""Causal attention by cuDNN for NVIDIA GPUs.

`jax.nn.dot_product_attention` has a rule too. Ours names its residuals, so that remat policies can save them. It keeps
the segments instead of their mask, which is [position, position]. It does not compute the mask's gradient. It treats
replicas mapped around it as more rows, for which JAX's rule has no form with a mask.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gregale.model.kernels.operations import ATTENTION_NAME, sink_gradients, with_sinks

HEAD_SIZE_MULTIPLE = 8
LARGEST_HEAD_SIZE = 128
LARGEST_HEAD_SIZE_FROM_HOPPER = 256
HOPPER = 9  # of a GPU's compute capability, the number before the point
HIDDEN = -(2.0**41)  # added to scores; small enough in magnitude that cuDNN can subtract two of them


def attend(q, k, v, segments, window: int | None, cap: float | None = None, sinks=None) -> jax.Array:
    """Compute attention without a cap: `dispatch` chooses another form for models with a cap.

    Segments and the window become a bias [batch, 1, position, position], which must have an even length.

    Without segments nothing has that size, and the kernel skips keys outside the window.
    """
    assert cap is None
    length = q.shape[1]
    if segments is not None and length % 2:
        q, k, v, segments, sinks = jax.tree.map(_with_one_more, (q, k, v, segments, sinks))
    attended: Any = _attend(window, q, k, v, segments, sinks)
    return attended[:, :length]


def _with_one_more(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 1), *((0, 0),) * (x.ndim - 2)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(window: int | None, q, k, v, segments, sinks) -> jax.Array:
    if sinks is not None:
        return _kept(window, q, k, v, segments, sinks)[0]
    return _by_rows(partial(_forward, window, False))(q, k, v, segments)[0]


def _kept(window: int | None, q, k, v, segments, sinks):
    attended, log_sum_exp = _by_rows(partial(_forward, window, True))(q, k, v, segments)
    attended, of_queries = with_sinks(attended, log_sum_exp.swapaxes(1, 2), sinks)
    attended, log_sum_exp = (checkpoint_name(x, ATTENTION_NAME) for x in (attended, of_queries.swapaxes(1, 2)))
    return attended, (sinks, (q, k, v, segments, log_sum_exp, attended))


def _gradients(window: int | None, kept, gradient):
    sinks, (*inputs, log_sum_exp, attended) = kept
    along = jnp.sum(attended.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)
    by_sinks = sink_gradients(sinks, log_sum_exp.swapaxes(1, 2), along)
    return *_by_rows(partial(_backward, window))(*inputs, log_sum_exp, attended, gradient), None, by_sinks


_attend.defvjp(_kept, _gradients)


def _forward(window: int | None, differentiated: bool, q, k, v, segments) -> tuple[jax.Array, ...]:
    """Return attention [batch, position, heads, head_size]; if differentiated also log-sum-exp [batch, heads,
    position].

    Log-sum-exp is in float32.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # no public function returns the kernel's own results

    operands, options = _call(window, q, segments)
    return tuple(
        cudnn._dot_product_attention_fwd_p.bind(q, k, v, *operands, is_training=differentiated, **options)  # pyright: ignore
    )


def _backward(window: int | None, q, k, v, segments, log_sum_exp, attended, gradient) -> tuple[jax.Array, ...]:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    operands, options = _call(window, q, segments)
    return tuple(
        cudnn._dot_product_attention_bwd_p.bind(  # pyright: ignore
            q, k, v, *operands, log_sum_exp, attended, gradient, **options
        )
    )


def _call(window: int | None, q: jax.Array, segments: jax.Array | None) -> tuple[list[jax.Array], dict[str, Any]]:
    """Return the operands after q, k and v of both operations, of which only the bias is used, and the options."""
    from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, MaskType

    none = jnp.zeros(0, q.dtype)  # JAX's form of a missing operand
    shown, hidden = (jnp.asarray(value, q.dtype) for value in (0.0, HIDDEN))
    bias = none if segments is None else jnp.where(seen(segments, window), shown, hidden)
    options = {
        "scale": q.shape[-1] ** -0.5,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (segments is not None, False),  # a bias, but not its gradient
        "mask_type": MaskType.CAUSAL,
        "layout": AttentionLayout.BTNH.value,
        "sliding_window_length": window if segments is None else None,
    }
    return [bias, *[none] * 6], options


def _by_rows(operation: Callable) -> Callable:
    """Return the operation whose arrays all begin with the axis of rows; an axis mapped around it joins that axis."""
    mapped = jax.custom_batching.custom_vmap(operation)

    @mapped.def_vmap
    def _(size: int, batched, *arrays):
        def merged(array, has_axis):
            whole = array if has_axis else jnp.broadcast_to(array, (size, *array.shape))
            return whole.reshape(-1, *whole.shape[2:])

        found = mapped(*jax.tree.map(merged, arrays, tuple(batched)))
        parts = jax.tree.map(lambda array: array.reshape(size, -1, *array.shape[1:]), found)
        return parts, jax.tree.map(lambda _: True, parts)

    return mapped


def seen(segments: jax.Array, window: int | None) -> jax.Array:
    """Return which keys are of a token's segment and not before its window: [batch, 1, position, position]."""
    same = segments[:, None, :, None] == segments[:, None, None, :]
    if window is None:
        return same
    places = jnp.arange(segments.shape[1])
    return same & (places[:, None] - places[None, :] < window)


def largest_head_size(compute_capability: str) -> int | None:
    """Return the limit for a GPU's compute capability, such as `8.0`; None if not NVIDIA's (`gfx942`)."""
    generation = compute_capability.partition(".")[0]
    if not generation.isdecimal():
        return None
    return LARGEST_HEAD_SIZE_FROM_HOPPER if int(generation) >= HOPPER else LARGEST_HEAD_SIZE
