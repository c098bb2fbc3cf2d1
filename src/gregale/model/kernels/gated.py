"""The gated activations of MLPs with their own backward pass, whose barriers differ between platforms."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from haliax import NamedArray

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
