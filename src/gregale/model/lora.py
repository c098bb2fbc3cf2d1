"""A linear layer with a low-rank adapter (LoRA, arXiv 2106.09685)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.nn import Linear


class Lora(Linear):
    """A linear layer of a model that computes, with an adapter: y = x W + bias + scale * (x A) B.

    `gregale.model.execution.Execution.project` computes it: A B, which has the size of W, is never made.

    - `dropout`: share of the values of x that are zero for A in training; the others are divided by the rest
    """

    lora_a: Linear = eqx.field(kw_only=True)  # A: [*In] -> [LoraRank]
    lora_b: Linear = eqx.field(kw_only=True)  # B: [LoraRank] -> [*Out]
    scale: float = eqx.field(static=True, kw_only=True)
    dropout: float = eqx.field(static=True, kw_only=True)

    @property
    def base(self) -> Linear:
        """Return the layer without its adapter."""
        return Linear(self.weight, self.bias, self.In, self.Out)

    def dropped(self, x: NamedArray, key: jax.Array) -> NamedArray:
        """Return the values of x that A sees in training: zero with the probability `dropout`, else x / (1 - dropout).

        The bits of A are part of the key, so that layers and projections drop different values.
        """
        row = jax.lax.stop_gradient(self.lora_a.weight.array).reshape(-1, self.lora_a.weight.array.shape[-1])[0]
        bits = jax.lax.bitcast_convert_type(row.astype(jnp.float32), jnp.uint32)
        own = jax.random.fold_in(key, hashed(bits))
        kept = jax.random.bernoulli(own, 1 - self.dropout, x.array.shape)
        return NamedArray(jnp.where(kept, x.array / (1 - self.dropout), 0).astype(x.dtype), x.axis_names)

    def __call__(self, inputs: Any, *, key: Any = None) -> Any:
        raise TypeError("a layer with an adapter is computed by `Execution.project(layer, x)`")


def hashed(values: jax.Array) -> jax.Array:
    """Return a number that depends on all integers of an array and on their places: uint32."""
    flat = values.reshape(-1).astype(jnp.uint32)
    factors = 2 * jnp.arange(flat.size, dtype=jnp.uint32) + 1
    return jnp.sum(flat * factors * jnp.uint32(2654435761), dtype=jnp.uint32)
