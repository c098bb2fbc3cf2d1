"""The norm of a gradient, and clipping by the norm."""

import jax
import jax.numpy as jnp
import optax


def global_norm(tree) -> jax.Array:
    """Return the L2 norm over all elements of all arrays of a tree, summed in float32: a float32 scalar."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def clip_by_norm(limit: float, of_gradients: bool = True) -> optax.GradientTransformationExtraArgs:
    """Scale updates by `limit / max(norm, limit)` (Pascanu et al., 1211.5063).

    A caller that has the norm of the gradients already (to report it) passes `gradient_norm=` to `update`, so that it
    is taken once.

    - `of_gradients`: the updates are the gradients
    """

    def update(updates, state, params=None, *, gradient_norm=None, **_):
        norm = gradient_norm if of_gradients and gradient_norm is not None else global_norm(updates)
        factor = limit / jnp.maximum(norm, limit)
        return jax.tree.map(lambda update: update * factor.astype(update.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
