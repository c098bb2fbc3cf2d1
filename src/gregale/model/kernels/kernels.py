"""The operations of a model that have more than one form, and their definitions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
from haliax import NamedArray
from haliax.nn import Linear

from gregale.model.kernels.grouped import GroupedProducts

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

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: jax.Array | None,
        window: int | None,
        cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array: ...


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
