"""Attention sinks: a logit of each query in the sum of its softmax, which has no value (arXiv 2309.17453).

    output = sum over keys j of: exp(s_j) v_j / (exp(sink) + sum over j of exp(s_j))

Kernels know nothing of them. A query's log-sum-exp gives the factor of its output; with this output and the log-sum-exp
of the whole sum, the backward pass of a kernel without sinks is exact.
"""

import jax
import jax.numpy as jnp


def with_sinks(output: jax.Array, exponent: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return a kernel's output [..., size] and log-sum-exp [...] with sinks [..., 1] in the sum; None: no sinks."""
    if sinks is None:
        return output, exponent
    kept = jax.nn.sigmoid(exponent[..., None] - sinks)
    return (output * kept).astype(output.dtype), jnp.logaddexp(exponent, sinks[..., 0])


def sink_gradients(sinks: jax.Array | None, exponent: jax.Array, along: jax.Array) -> jax.Array | None:
    """Return the gradients by sinks, -exp(sink - exponent) along; `along`: the sum of output * cotangent, [...]."""
    return None if sinks is None else -jnp.exp(sinks - exponent[..., None]) * along[..., None]
