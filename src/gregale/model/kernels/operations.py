"""The operations of a model that have more than one form: their definitions, and their form in plain JAX.

With attention sinks, a logit of each query that has no value (arXiv 2309.17453):

    output = sum over keys j of: exp(s_j) v_j / (exp(sink) + sum over j of exp(s_j))

Kernels know nothing of sinks. A query's log-sum-exp gives the factor of its output; with this output and the
log-sum-exp of the whole sum, the backward pass of a kernel without sinks is exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from haliax.nn import Linear
from jax.ad_checkpoint import checkpoint_name

from gregale.axes.layout import CONTEXT
from gregale.axes.parameters import chunk_order
from gregale.model.kernels.grouped import BLOCKED, GroupedProducts
from gregale.model.kernels.grouped_int8 import BLOCKED_INT8
from gregale.scopes import sees

# The name of attention's output among a block's intermediates (`jax.ad_checkpoint.checkpoint_name`).
ATTENTION_NAME = "attention"


class Attend(Protocol):
    """Causal self-attention, softmax(s) . v with s = q . k / sqrt(head size), the softmax in float32.

    A token sees the tokens of its own segment at or before its index, at most `window` of them. Query head n reads
    key/value head n // (heads / kv_heads). The form names its output, and small residuals that avoid a second forward
    pass, `ATTENTION_NAME` for remat policies.

    - `q`: [batch, position, heads, head_size]
    - `k`, `v`: [batch, position, kv_heads, head_size]
    - `segments`: integers [batch, position]; None: one segment
    - `window`: None: no limit
    - `cap`: softmax(cap * tanh(s / cap)) in place of softmax(s); None: no cap
    - `sinks`: logits without values (`kernels.sinks`), float32 [batch, position, heads, 1]; None: there are none
    """

    def __call__(self, q, k, v, segments, window: int | None, cap: float | None = None, sinks=None) -> jax.Array: ...


AttendWithLargest = Callable[..., tuple[jax.Array, jax.Array | None]]
"""The same with the largest score of each query, capped and without sinks, a constant: [batch, position, heads]."""


@dataclass(frozen=True)
class Kernels:
    """One form of every operation. All forms compute equal values and gradients up to rounding.

    - `rules`: the origin of the differentiation rules: `plain` (JAX's own) or a platform
    - `attention`: the name of attention's form
    - `project(layer, x)`: the linear layer's product, and its bias
    - `swiglu(gate, up)`: silu(gate) * up
    - `geglu(gate, up)`: gelu(gate) * up, by the approximation with tanh
    - `rms_norm(x, weight, epsilon, square=None)`: x / sqrt(square + epsilon) * weight over the last axis, which is the
      weight's; all except the product with the weight in float32. `square` is mean(x^2), float32 and without the last
      axis; None: it is computed. Its own derivative is part of that by `x`
    - `hands_on_squares`: a layer computes the mean square of its output, for the norm of the next layer
    - `rotate(x, angle)`: channel pairs (i, i + half) of the last axis turned by `angle` [..., half], float32 radians
      that broadcast to the other axes of `x`; computed in float32, in the dtype of `x`
    - `opaque`: attention is a kernel, which the partitioner cannot split: it must run on each device's own rows and
      heads (`Execution.attend` does)
    - `attend`: causal self-attention; the single queries of generation use `Cache.attend`
    - `attend_with_largest`: the same with the largest scores; None: this form has none
    - `grouped`: products of rows with the matrices of their groups, inside of `jax.shard_map`
    - `grouped_int8`: the same of 8-bit integers, see `gregale.model.kernels.grouped_int8`
    """

    rules: str
    attention: str
    opaque: bool
    project: Callable[[Linear, NamedArray], NamedArray]
    swiglu: Callable[[NamedArray, NamedArray], NamedArray]
    geglu: Callable[[NamedArray, NamedArray], NamedArray]
    rms_norm: Callable[..., NamedArray]
    rotate: Callable[[jax.Array, jax.Array], jax.Array]
    attend: Attend
    grouped: GroupedProducts
    grouped_int8: GroupedProducts
    hands_on_squares: bool = False
    attend_with_largest: AttendWithLargest | None = None


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


def attend(q, k, v, segments, window: int | None, cap: float | None = None, sinks=None) -> jax.Array:
    with sees(q.shape[1], window):
        return checkpoint_name(_attend(q, k, v, segments, window, cap, sinks), ATTENTION_NAME)


def _attend(q, k, v, segments, window: int | None, cap: float | None, sinks) -> jax.Array:
    if cap is not None or sinks is not None:
        return _attend_with(q, k, v, segments, window, cap, sinks)
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, local_window_size=local, implementation="xla"
    )


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


Arrays = tuple[jax.Array, ...]


def gated_with(
    activation: Callable[[jax.Array], jax.Array],
    gradients: Callable[[jax.Array, jax.Array, jax.Array], Arrays],
    read: Callable[[Arrays], Arrays],
) -> Callable[[NamedArray, NamedArray], NamedArray]:
    """Return a gated activation, whose gradients are computed once, apart from the products that use them.

    The backward pass keeps gate and up alone.

    - `activation`: of gate; times up, it is the output
    - `gradients(gate, up, by_output)`: those by gate and up, float32
    - `read`: passes gate, up and the cotangent to the backward pass; a barrier separates it from earlier operations
    """

    @jax.custom_vjp
    def product(gate: jax.Array, up: jax.Array) -> jax.Array:
        return activation(gate) * up

    def forward(gate, up):
        return product(gate, up), (gate, up)

    def backward(saved, cotangent):
        by_gate, by_up = gradients(*(x.astype(jnp.float32) for x in read((*saved, cotangent))))
        return jax.lax.optimization_barrier((by_gate.astype(saved[0].dtype), by_up.astype(saved[1].dtype)))

    product.defvjp(forward, backward)

    def gated(gate: NamedArray, up: NamedArray) -> NamedArray:
        return NamedArray(product(gate.array, up.rearrange(gate.axes).array), gate.axis_names)

    return gated


def whole(x: jax.Array, devices: int) -> jax.Array:
    """Turn this device's positions [batch, position, ...] into all, in the order of the sequence."""
    chunks = x.reshape(x.shape[0], 2, -1, *x.shape[2:])
    held = jax.lax.all_gather(chunks, CONTEXT, axis=1, tiled=True)
    inverse = np.argsort(chunk_order(devices))
    return held.at[:, inverse].get(unique_indices=True).reshape(x.shape[0], -1, *x.shape[2:])


def halo(x: jax.Array, devices: int, reach: int) -> jax.Array:
    """Turn this device's positions [batch, position, ...] into each of its chunks after the `reach` chunks before it.

    A device's first chunk follows that of the device before it, and its second chunk that of the device after it, or on
    the last device its own first chunk. So chunks move by one device at a time. Those before the sequence are zeros.
    """
    up = [(device, device + 1) for device in range(devices - 1)]
    down = [(after, before) for before, after in up]
    is_last = jax.lax.axis_index(CONTEXT) == devices - 1
    first, second = jnp.split(x, 2, axis=1)
    firsts, seconds = [first], [second]
    for _ in range(reach):
        sent = (jax.lax.ppermute(each, CONTEXT, pairs) for each, pairs in ((first, up), (second, down)))
        before, above = sent
        first, second = before, jnp.where(is_last, first, above)
        firsts.insert(0, first)
        seconds.insert(0, second)
    return jnp.concatenate([*firsts, *seconds], axis=1)


def halo_of(whole: jax.Array, devices: int, reach: int) -> jax.Array:
    """Return the part of whole sequences [batch, position] that `halo` has, -1 before the sequence.

    For segments, which are small and the same in all layers.
    """
    device, before = jax.lax.axis_index(CONTEXT), jnp.arange(-reach, 1)
    chunks = jnp.concatenate([device + before, 2 * devices - 1 - device + before])
    beyond = jnp.where(chunks < 0, 2 * devices, chunks)
    held = whole.reshape(whole.shape[0], 2 * devices, -1)
    return held.at[:, beyond].get(mode="fill", fill_value=-1).reshape(whole.shape[0], -1)


def with_sinks(output: jax.Array, exponent: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return a kernel's output [..., size] and log-sum-exp [...] with sinks [..., 1] in the sum; None: no sinks."""
    if sinks is None:
        return output, exponent
    kept = jax.nn.sigmoid(exponent[..., None] - sinks)
    return (output * kept).astype(output.dtype), jnp.logaddexp(exponent, sinks[..., 0])


def sink_gradients(sinks: jax.Array | None, exponent: jax.Array, along: jax.Array) -> jax.Array | None:
    """Return the gradients by sinks, -exp(sink - exponent) along; `along`: the sum of output * cotangent, [...]."""
    return None if sinks is None else -jnp.exp(sinks - exponent[..., None]) * along[..., None]
