"""Attention sinks: a logit of each query in the sum of its softmax, which has no value (arXiv 2309.17453).

    output = sum over keys j of: exp(s_j) v_j / (exp(sink) + sum over j of exp(s_j))

A kernel knows nothing of them. The sum changes only a query's factor, which its log-sum-exp gives, and what a kernel's
backward pass takes: with these outputs and log-sum-exps its gradients are exact.
"""

import jax
import jax.numpy as jnp


def with_sinks(output: jax.Array, exponent: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return a kernel's output [..., size] and log-sum-exp [...] with sinks [...] in the sum; None: there are none."""
    if sinks is None:
        return output, exponent
    kept = jax.nn.sigmoid(exponent - sinks)
    return (output * kept[..., None]).astype(output.dtype), jnp.logaddexp(exponent, sinks)


def sink_gradients(sinks: jax.Array | None, exponent: jax.Array, along: jax.Array) -> jax.Array | None:
    """Return the gradients by sinks, -exp(sink - exponent) along; a sink's weight only takes from those of keys.

    - `exponent`: log-sum-exp with the sinks
    - `along`: the sum of output * cotangent over size, float32 [...]
    """
    return None if sinks is None else -jnp.exp(sinks - exponent) * along
