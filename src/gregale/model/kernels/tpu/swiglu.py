"""SwiGLU with a backward pass of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.model.kernels.plain import swiglu_gradients


def swiglu(gate: NamedArray, up: NamedArray) -> NamedArray:
    return NamedArray(_swiglu(gate.array, up.rearrange(gate.axes).array), gate.axis_names)


@jax.custom_vjp
def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _swiglu_forward(gate, up):
    return _swiglu(gate, up), (gate, up)


def _swiglu_backward(saved, cotangent):
    """The barrier has both gradients made once, at the end of the product before them.

    XLA:TPU else makes them again inside of each of the four products that take them, which costs every one of these a
    third of its time, and has a pass over gate and up for one of them besides.
    """
    by_gate, by_up = swiglu_gradients(*(x.astype(jnp.float32) for x in (*saved, cotangent)))
    return jax.lax.optimization_barrier((by_gate.astype(saved[0].dtype), by_up.astype(saved[1].dtype)))


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)
