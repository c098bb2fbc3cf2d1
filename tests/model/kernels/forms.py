"""A form of an operation against the plain one, values and gradients: what the tests of all forms share."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gregale.model.kernels.operations import PLAIN, Kernels

FLOAT32_TOLERANCE = 1e-5  # of an array's largest value
# An array's rounding to bfloat16 alone, of its norm; a rule may be so much further off than the plain form by chance.
BFLOAT16_ROUNDING = 1.5e-3


def as_dtype(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def value_and_gradients(function: Callable, arguments: tuple) -> list[np.ndarray]:
    """The output, and the gradients by all floating arguments of a sum of the output with fixed random weights."""

    floats, rest = eqx.partition(arguments, eqx.is_inexact_array)

    @jax.jit
    def run(floats):
        output, backward = jax.vjp(lambda floats: function(*eqx.combine(floats, rest)), floats)
        weights = jax.tree.map(lambda x: jax.random.normal(jax.random.key(99), x.shape).astype(x.dtype), output)
        return output, backward(weights)

    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(run(floats))]


def assert_equal(
    form: Callable[[Kernels], Callable], kernels: Kernels, arguments: tuple, dtype, rounding: float = BFLOAT16_ROUNDING
) -> None:
    """In float32 it is the plain form; in bfloat16 it is as near to float32's as the plain form is, but for rounding.

    `form(kernels)` is the function to compare.
    """
    narrow = as_dtype(arguments, dtype)
    exact = value_and_gradients(form(PLAIN), as_dtype(narrow, jnp.float32))
    found, plain = (value_and_gradients(form(each), narrow) for each in (kernels, PLAIN))
    assert len(found) == len(exact)
    for ours, theirs, right in zip(found, plain, exact, strict=True):
        if dtype == jnp.float32:
            np.testing.assert_allclose(ours, right, rtol=0, atol=FLOAT32_TOLERANCE * np.abs(right).max())
        else:
            error, plain_error = (np.linalg.norm(each - right) for each in (ours, theirs))
            assert error <= plain_error + rounding * np.linalg.norm(right)
