"""SwiGLU with its own backward pass, whose barriers differ between platforms."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.model.kernels.reference import swiglu_gradients

Arrays = tuple[jax.Array, ...]


def swiglu_with(read: Callable[[Arrays], Arrays]) -> Callable[[NamedArray, NamedArray], NamedArray]:
    """Return `silu(gate) * up`, whose gradients are computed once, apart from the products that use them.

    - `read`: passes gate, up and the cotangent to the backward pass; a barrier separates it from earlier operations
    """

    @jax.custom_vjp
    def product(gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(gate) * up

    def forward(gate, up):
        return product(gate, up), (gate, up)

    def backward(saved, cotangent):
        by_gate, by_up = swiglu_gradients(*(x.astype(jnp.float32) for x in read((*saved, cotangent))))
        return jax.lax.optimization_barrier((by_gate.astype(saved[0].dtype), by_up.astype(saved[1].dtype)))

    product.defvjp(forward, backward)

    def swiglu(gate: NamedArray, up: NamedArray) -> NamedArray:
        return NamedArray(product(gate.array, up.rearrange(gate.axes).array), gate.axis_names)

    return swiglu
