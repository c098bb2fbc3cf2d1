"""The tiles of grouped kernels, for widths that tiles do and do not divide."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from gregale.model.kernels.tpu.grouped import ROWS, tiles
from gregale.model.kernels.tpu.grouped_products import sum_of_turned

SIZES = np.array([100, 0, 27, 129], np.int32)  # an empty group, and groups that share blocks of rows


def test_tiles_fit_and_are_two_of_the_outputs():
    assert tiles(2048, 768) == (ROWS, 2048, 384)
    assert tiles(768, 2048) == (ROWS, 768, 1024)
    assert tiles(2880, 2880) == (ROWS, 1536, 512), "no multiple of 128"
    assert tiles(2048, 1408) == (ROWS, 2048, 512), "11 times 128, of which no divisor but 128 is small enough"
    assert tiles(14336, 4096) == (ROWS, 2048, 512)
    assert tiles(64, 96) == (ROWS, 64, 96), "less than a row of lanes"


@pytest.mark.parametrize(("inputs", "outputs"), [(192, 320), (2100, 200)])
def test_the_last_tile_may_be_cut(inputs, outputs, monkeypatch):
    """Relative to the largest value of each group's own."""
    random, groups = np.random.default_rng(0), np.repeat(np.arange(len(SIZES)), SIZES)
    x, y = (random.normal(size=(len(groups), size)).astype(np.float32) for size in (inputs, outputs))
    w, own = random.normal(size=(len(SIZES), inputs, outputs)).astype(np.float32), tiles(inputs, outputs)
    with jax.default_matmul_precision("highest"):
        found = gmm(x, w, SIZES, jnp.float32, own, interpret=True)
        by_x = gmm(y, w, SIZES, jnp.float32, tiles(outputs, inputs), transpose_rhs=True, interpret=True)
        monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
        both = sum_of_turned((y, y[:, ::-1].copy()), (w, 2 * w), SIZES, cores=2)
        by_w = tgmm(x.T, y, SIZES, jnp.float32, own, interpret=True)
        found, by_x, both, by_w = jax.device_get((found, by_x, both, by_w))
        for group in range(len(SIZES)):
            here = groups == group
            np.testing.assert_allclose(found[here], x[here] @ w[group], atol=1e-3)
            np.testing.assert_allclose(by_x[here], y[here] @ w[group].T, atol=1e-3)
            np.testing.assert_allclose(both[here], (y[here] + 2 * y[here, ::-1]) @ w[group].T, atol=1e-3)
            exact = x[here].T @ y[here]
            np.testing.assert_allclose(by_w[group], exact, atol=1e-6 * np.abs(exact).max() + 1e-12)
