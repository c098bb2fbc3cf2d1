"""The state of optimizers in bfloat16 and in 8 bits, against NumPy."""

import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gregale.errors import KeyedError
from gregale.optim import AdamWConfig, ConstantSchedule, LionConfig, MuonConfig, SgdConfig
from gregale.optim.moments import Int8Moment, is_int8, stochastically_rounded
from tests.mesh.support import layout_of

PLAIN = {"schedule": ConstantSchedule(), "clip_norm": None, "weight_decay": 0.0, "moments": "bfloat16"}


def chances(values, count: int) -> np.ndarray:
    """16 bits for each value."""
    with np.errstate(over="ignore"):
        chance = (np.float32(values).view(np.uint32) ^ (np.uint32(count) * np.uint32(0x9E3779B9))) * np.uint32(
            0x85EBCA6B
        )
        chance = (chance ^ (chance >> 13)) * np.uint32(0xC2B2AE35)
    return (chance ^ (chance >> 16)) & 0xFFFF


def rounded(values, count: int) -> np.ndarray:
    bits = np.float32(values).view(np.uint32)
    return ((bits + chances(values, count)) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


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


def in_codes(values: np.ndarray, count: int) -> np.ndarray:
    """The values of [..., blocks, 16] in float64 after 8 bits: the nearest two levels by chance, see `Int8Moment`."""
    found = np.zeros(values.shape)
    scales = (
        (np.abs(values).max(-1) * np.float32((128 / 127) ** 2 * (1 + 2**-8)))
        .astype(ml_dtypes.bfloat16)
        .astype(np.float32)
    )
    chance = chances(values, count)
    for place in np.ndindex(*values.shape):
        value, scale = abs(values[place]), scales[place[:-1]]
        if scale:
            levels = scale * (np.arange(128, dtype=np.float32) / 128) ** 2
            below = min(int(np.searchsorted(levels, value, side="right")) - 1, 126)
            share = (value - levels[below]) / (levels[below + 1] - levels[below])
            code = below + (share * 2**16 > chance[place])
            is_positive = (values[place[:-1]] >= 0).all() and value > 0
            found[place] = np.sign(values[place]) * levels[max(code, 1) if is_positive else code]
    return found


def test_ten_steps_in_eight_bits_have_the_state_and_parameters_of_the_slow_rewrite():
    """Blocks lie along `embed`, wherever it is; what has no such axis stays float32, and zeros stay zeros."""
    random, Embed, Mlp = np.random.default_rng(0), hax.Axis("embed", 32), hax.Axis("mlp", 3)
    zeros = {"up": hax.zeros((Embed, Mlp)), "bias": hax.zeros(Mlp)}
    config = AdamWConfig(learning_rate=0.01, betas=(0.5, 0.5), **PLAIN | {"moments": "int8"})
    optimizer = config.build(zeros, 10).whole()
    first, second = np.zeros((32, 3)), np.zeros((32, 3))
    state, update = optimizer.init(zeros), jax.jit(optimizer.update)
    for step in range(1, 11):
        gradient = random.integers(-127, 128, (32, 3)).astype(np.float32) * (np.arange(32) > 2)[:, None]
        updates, state = update(
            {"up": hax.named(jnp.asarray(gradient), (Embed, Mlp)), "bias": zeros["bias"]}, state, zeros
        )
        first, second = first / 2 + gradient / 2, second / 2 + gradient**2 / 2
        unbiased = 1 - 0.5**step
        expected = -0.01 * (first / unbiased) / (np.sqrt(second / unbiased) + 1e-8)
        np.testing.assert_allclose(updates["up"].array, expected, rtol=1e-5, atol=1e-8)
        kept = [node for node in jax.tree.leaves(state, is_leaf=is_int8) if is_int8(node)]
        assert [node.codes.array.dtype for node in kept] == [jnp.int8] * 2
        blocks = [np.float32(each).T.reshape(3, 2, 16) for each in (first, second)]
        first, second = (in_codes(each, step).reshape(3, 32).T for each in blocks)
        for node, moment in zip(kept, (first, second), strict=True):
            np.testing.assert_allclose(node.decoded().array, moment, rtol=1e-5, atol=1e-8)
        first, second = (np.asarray(node.decoded().array, np.float64) for node in kept)
    assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.shape == (3,)} == {jnp.dtype(jnp.float32)}


def test_eight_bits_keep_the_mean():
    values = np.float32([1.0, 0.013, -0.4, 3e-5, -2e-4] + 11 * [0.0])
    moment = hax.named(jnp.asarray(values), hax.Axis("embed", 16))
    found = jax.jit(jax.vmap(lambda count: Int8Moment.of(moment, count).decoded().array))(np.arange(20_000))
    np.testing.assert_allclose(np.asarray(found, np.float64).mean(0), values, rtol=5e-3, atol=1e-6)
    positive = hax.named(jnp.abs(moment.array), moment.axes)
    assert (Int8Moment.of(positive, 5).decoded().array > 0).tolist() == (values != 0).tolist()


def test_blocks_that_devices_would_split():
    layout = layout_of(replica=2, data=4)
    with pytest.raises(KeyedError, match=r"96 / \(16 x 8 devices\) = 0\.75 is not a whole number"):
        AdamWConfig(moments="int8").build({"up": hax.zeros(hax.Axis("embed", 96))}, 10, layout)
