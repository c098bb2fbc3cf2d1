"""Causal attention by cuDNN's fused kernels: JAX's two operations for them, under a rule of differentiation of our own.

`jax.nn.dot_product_attention` has a rule too. Ours names what it keeps, so that remat policies can save it; it keeps
the segments and not the mask that is made of them, which is [position, position]; it does not ask for the mask's
gradient; and it takes replicas that are mapped around it as more rows, for which JAX's has no form with a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gregale.model.kernels.kernels import ATTENTION_NAME

HEAD_SIZE_MULTIPLE = 8
LARGEST_HEAD_SIZE = 128
LARGEST_HEAD_SIZE_FROM_HOPPER = 256
HOPPER = 9  # of a GPU's compute capability, the number before the point
HIDDEN = -(2.0**41)  # added to scores; so far from the largest number that cuDNN can subtract two of them


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    window: int | None,
    cap: float | None = None,
) -> jax.Array:
    """There is no cap: `choice` gives models that have one another form.

    Segments become a bias [batch, 1, position, position], which has to have an even length; it holds the window too.

    Without segments nothing is of that size, and the kernel skips what the window hides.
    """
    assert cap is None
    length = q.shape[1]
    if segments is not None and length % 2:
        q, k, v, segments = (jnp.pad(x, ((0, 0), (0, 1), *((0, 0),) * (x.ndim - 2))) for x in (q, k, v, segments))
    attended: Any = _attend(window, q, k, v, segments)
    return attended[:, :length]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(window: int | None, q, k, v, segments) -> jax.Array:
    return _by_rows(partial(_forward, window, False))(q, k, v, segments)[0]


def _kept(window: int | None, q, k, v, segments):
    attended, log_sum_exp = _by_rows(partial(_forward, window, True))(q, k, v, segments)
    attended, log_sum_exp = (checkpoint_name(x, ATTENTION_NAME) for x in (attended, log_sum_exp))
    return attended, (q, k, v, segments, log_sum_exp, attended)


def _gradients(window: int | None, kept, gradient):
    return *_by_rows(partial(_backward, window))(*kept, gradient), None


_attend.defvjp(_kept, _gradients)


def _forward(window: int | None, differentiated: bool, q, k, v, segments) -> tuple[jax.Array, ...]:
    """Attention [batch, position, heads, head_size], and if it is differentiated log-sum-exp, [batch, heads, position].

    The latter is in float32.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # nothing public names the kernel's own results

    operands, options = _call(window, q, segments)
    return tuple(
        cudnn._dot_product_attention_fwd_p.bind(q, k, v, *operands, is_training=differentiated, **options)  # pyright: ignore
    )


def _backward(window: int | None, q, k, v, segments, log_sum_exp, attended, gradient) -> tuple[jax.Array, ...]:
    """The gradients by q, k and v."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    operands, options = _call(window, q, segments)
    return tuple(
        cudnn._dot_product_attention_bwd_p.bind(  # pyright: ignore
            q, k, v, *operands, log_sum_exp, attended, gradient, **options
        )
    )


def _call(window: int | None, q: jax.Array, segments: jax.Array | None) -> tuple[list[jax.Array], dict[str, Any]]:
    """What both operations take: the operands behind q, k and v, of which a bias is the only one, and the options."""
    from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, MaskType

    none = jnp.zeros(0, q.dtype)  # what JAX takes for an operand that is not there
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
    """The operation, whose arrays all begin with the axis of rows; an axis that is mapped around it is part of that."""
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
    """Which keys are of a token's segment and not before its window: [batch, 1, position, position]."""
    same = segments[:, None, :, None] == segments[:, None, None, :]
    if window is None:
        return same
    places = jnp.arange(segments.shape[1])
    return same & (places[:, None] - places[None, :] < window)


def largest_head_size(compute_capability: str) -> int | None:
    """Of a GPU by its compute capability, such as `8.0`; None: it is not NVIDIA's (`gfx942`)."""
    generation = compute_capability.partition(".")[0]
    if not generation.isdecimal():
        return None
    return LARGEST_HEAD_SIZE_FROM_HOPPER if int(generation) >= HOPPER else LARGEST_HEAD_SIZE
