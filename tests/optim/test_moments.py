"""The state of optimizers in bfloat16, against NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gregale.optim import AdamWConfig, ConstantSchedule, LionConfig, MuonConfig, SgdConfig
from gregale.optim.moments import stochastically_rounded

PLAIN = {"schedule": ConstantSchedule(), "clip_norm": None, "weight_decay": 0.0, "moments": "bfloat16"}


def rounded(values, count: int) -> np.ndarray:
    bits = np.float32(values).view(np.uint32)
    with np.errstate(over="ignore"):
        chance = (bits ^ (np.uint32(count) * np.uint32(0x9E3779B9))) * np.uint32(0x85EBCA6B)
        chance = (chance ^ (chance >> 13)) * np.uint32(0xC2B2AE35)
    chance = chance ^ (chance >> 16)
    return ((bits + (chance & 0xFFFF)) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


def test_ten_steps_of_adamw_have_the_state_and_parameters_of_the_slow_rewrite():
    """Gradients are small integers and decays 1/2, so that float32 is exact before it is rounded."""
    random, shape = np.random.default_rng(0), (5, 40)
    optimizer = AdamWConfig(learning_rate=0.01, betas=(0.5, 0.5), **PLAIN).build(jnp.zeros(shape), 10).whole()
    parameters, first, second = np.zeros(shape, np.float32), np.zeros(shape), np.zeros(shape)
    state, update = optimizer.init(jnp.zeros(shape)), jax.jit(optimizer.update)
    for step in range(1, 11):
        gradient = random.integers(-127, 128, shape).astype(np.float32)
        updates, state = update(gradient, state, parameters)
        first, second = first / 2 + gradient / 2, second / 2 + gradient**2 / 2
        unbiased = 1 - 0.5**step
        expected = -0.01 * (first / unbiased) / (np.sqrt(second / unbiased) + 1e-8)
        np.testing.assert_allclose(updates, expected, rtol=1e-5, atol=1e-8)
        kept = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
        first, second = (rounded(moment, step).astype(np.float64) for moment in (first, second))
        for found, moment in zip(kept, (first, second), strict=True):
            assert found.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(found, np.float64), moment)
        parameters = parameters + np.asarray(updates)


def test_rounding_keeps_the_mean_and_what_bfloat16_holds_or_is_not_finite():
    values = np.float32([1.001, -0.3, 1e-30, 7.77e9])
    found = jax.jit(jax.vmap(stochastically_rounded, (None, 0)))(values, np.arange(20_000))
    means = np.asarray(found, np.float64).mean(0)
    np.testing.assert_allclose(means, values, rtol=2e-4)  # half a last bit is 2e-3; of the mean three deviations 4e-5
    assert len(np.unique(np.asarray(found, np.float32)[:, 0])) == 2
    same = np.float32([0.0, -0.0, 0.5, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(np.asarray(stochastically_rounded(same, 3), np.float32), same)


@pytest.mark.parametrize(
    "config", [LionConfig(**PLAIN), SgdConfig(**PLAIN), MuonConfig(**PLAIN)], ids=lambda c: type(c).__name__
)
def test_other_optimizers_keep_their_momentum_so(config):
    optimizer = config.build({"w": jnp.zeros((6, 8)), "b": jnp.zeros(8)}, 10).whole()
    gradients = {"w": jnp.ones((6, 8)), "b": jnp.ones(8)}
    _, state = jax.jit(optimizer.update)(gradients, optimizer.init(gradients), gradients)
    kept = [leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert kept
    assert set(kept) == {jnp.dtype(jnp.bfloat16)}
