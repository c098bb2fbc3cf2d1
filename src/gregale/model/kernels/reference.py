"""The operations in plain JAX, which differentiates them: the form for every platform without its own rules."""

from collections.abc import Callable

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.nn import Linear
from jax.ad_checkpoint import checkpoint_name

from gregale.model.kernels.grouped import BLOCKED
from gregale.model.kernels.grouped_int8 import BLOCKED_INT8
from gregale.model.kernels.kernels import ATTENTION_NAME, Kernels

CLIP_LIMIT, CLIP_SLOPE = 7.0, 1.702  # of gpt-oss


def project(layer: Linear, x: NamedArray) -> NamedArray:
    return layer(x)


def swiglu(gate: NamedArray, up: NamedArray) -> NamedArray:
    return hax.nn.silu(gate) * up


def geglu(gate: NamedArray, up: NamedArray) -> NamedArray:
    return hax.nn.gelu(gate, approximate=True) * up


def swiglu_gradients(gate: jax.Array, up: jax.Array, by_output: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return d/dgate = up s (1 + gate (1 - s)) and d/dup = gate s, times `by_output`, in float32; s = sigmoid(gate)."""
    sigmoid = jax.nn.sigmoid(gate)
    return by_output * up * sigmoid * (1 + gate * (1 - sigmoid)), by_output * gate * sigmoid


def geglu_gradients(gate: jax.Array, up: jax.Array, by_output: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return d/dgate = up gelu'(gate) and d/dup = gelu(gate), times `by_output`, in float32."""
    value, slope = jax.jvp(jax.nn.gelu, (gate,), (jnp.ones_like(gate),))
    return by_output * up * slope, by_output * value


def rms_norm(x: NamedArray, weight: NamedArray, epsilon: float, square: jax.Array | None = None) -> NamedArray:
    """Compute RMSNorm without broadcasting the root and the weight to the shape of `x`, as Haliax's own does.

    The backward pass would keep both in that shape. Here they have axes of size 1. JAX differentiates the mean square,
    so that it is always computed here.
    """
    exact = x.array.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(exact), axis=-1, keepdims=True) + epsilon)
    return NamedArray((exact * inverse).astype(x.dtype) * weight.array.astype(x.dtype), x.axis_names)


def norm_gradients(x, weight, inverse: jax.Array, by_output: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return inverse (c - n mean(c n)) by x, and the sum over rows of by_output n by weight, in float32.

    - `inverse`: 1 / sqrt(mean(x^2) + epsilon), with a last axis of size 1; n = x inverse, c = by_output weight
    """
    x, weight, by_output = (each.astype(jnp.float32) for each in (x, weight, by_output))
    normal, scaled = x * inverse, by_output * weight
    by_x = inverse * (scaled - normal * jnp.mean(scaled * normal, axis=-1, keepdims=True))
    return by_x, jnp.sum(by_output * normal, axis=tuple(range(x.ndim - 1)))


def rotate(x: jax.Array, angle: jax.Array) -> jax.Array:
    return turned(x, jnp.cos(angle), jnp.sin(angle))


def turned(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Compute `Kernels.rotate` with the angles' cosines and sines."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def clipped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return (up + 1) gate sigmoid(1.702 gate) with |up| at most 7, and gate at most 7 (gpt-oss)."""
    gate, up = (jnp.where(x > CLIP_LIMIT, CLIP_LIMIT, x) for x in (gate, up))
    up = jnp.where(up < -CLIP_LIMIT, -CLIP_LIMIT, up)
    return (up + 1) * gate * jax.nn.sigmoid(CLIP_SLOPE * gate)


# Of gate and up, by the name of the activation.
GATED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "clipped": clipped_swiglu,
}


def attend(
    q, k, v, segments, window: int | None, cap: float | None = None, sinks: jax.Array | None = None
) -> jax.Array:
    if cap is not None or sinks is not None:
        return checkpoint_name(_attend_with(q, k, v, segments, window, cap, sinks), ATTENTION_NAME)
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    local = None if window is None else (window - 1, 0)
    attended = jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, local_window_size=local, implementation="xla"
    )
    return checkpoint_name(attended, ATTENTION_NAME)


def _attend_with(q, k, v, segments, window: int | None, cap: float | None, sinks: jax.Array | None) -> jax.Array:
    """Compute attention with a cap or sinks, which JAX's own form lacks."""
    batch, length, heads, size = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, size)
    scores = jnp.einsum("bskgd,btkd->bkgst", grouped, k, preferred_element_type=jnp.float32)
    back = jnp.arange(length)[:, None] - jnp.arange(length)
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    if segments is not None:
        seen = seen & (segments[:, None, None, :, None] == segments[:, None, None, None, :])
    scores = jnp.where(seen, capped(scores * size**-0.5, cap), -jnp.inf)
    if sinks is not None:
        column = sinks.swapaxes(1, 2).reshape(*scores.shape[:-1], 1)
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores)[..., :length].astype(v.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(batch, length, heads, size)


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    return x if cap is None else cap * jnp.tanh(x / cap)


PLAIN = Kernels(
    rules="plain",
    attention="xla",
    opaque=False,
    project=project,
    swiglu=swiglu,
    geglu=geglu,
    rms_norm=rms_norm,
    rotate=rotate,
    attend=attend,
    grouped=BLOCKED,
    grouped_int8=BLOCKED_INT8,
)
