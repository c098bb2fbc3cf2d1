"""The splash kernels, step by step on a CPU, against the plain form; and how rows are cut into blocks."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gregale.axes.layout import BATCH, POSITION
from gregale.axes.position_order import position_order
from gregale.model.kernels.reference import PLAIN
from gregale.model.kernels.tpu import blocks as sizes
from gregale.model.kernels.tpu.blocks import Blocks, blocks_for
from gregale.model.kernels.tpu.splash import Mask, Splash
from tests.mesh.support import layout_of
from tests.model.kernels.forms import assert_equal

V5E, V6E = "TPU v5 lite", "TPU v6 lite"
SPLASH = replace(PLAIN, attention="splash", opaque=True, attend=Splash(V5E, interpret=True))
# Beside the plain form's own roundings: of queries after they are scaled, of the output of which the backward pass
# takes the sum, of fused gradients by queries once a block.
BFLOAT16_ROUNDING = 5e-3


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks a row, in rows that are short enough to be interpreted."""
    monkeypatch.setattr(sizes, "ROWS", 128)
    monkeypatch.setattr(sizes, "FEWEST_IN_WINDOW", 128)
    monkeypatch.setattr(sizes, "FUSED_UP_TO", 600)


# length, window, cap, (heads, kv_heads), head_size, packed, dtype; beyond 600 tokens with a split backward pass.
CASES = {
    "odd": (131, None, None, (1, 1), 136, False, jnp.float32),
    "grouped": (256, None, None, (4, 2), 16, True, jnp.float32),
    "split": (640, 200, None, (2, 1), 8, True, jnp.float32),
    "paired": (500, None, None, (2, 1), 8, True, jnp.float32),
    "capped": (200, 70, 1.5, (2, 1), 8, True, jnp.float32),
    "bfloat16": (250, 70, None, (2, 1), 8, True, jnp.bfloat16),
}


@pytest.mark.parametrize(
    ("length", "window", "cap", "heads", "head_size", "packed", "dtype"), CASES.values(), ids=CASES
)
def test_attention(small_blocks, length, window, cap, heads, head_size, packed, dtype):
    q, k, v = (
        2 * jax.random.normal(jax.random.key(seed), (2, length, count, head_size))
        for seed, count in enumerate((heads[0], heads[1], heads[1]))
    )
    segments = jnp.cumsum(jax.random.bernoulli(jax.random.key(3), 0.02, (2, length)), axis=1) if packed else None

    def form(kernels):
        return lambda q, k, v: kernels.attend(q, k, v, segments, window, cap)

    assert_equal(form, SPLASH, (q, k, v), dtype, BFLOAT16_ROUNDING)


@pytest.mark.parametrize(
    ("devices", "window", "packed"), [(2, None, True), (2, 200, False), (4, 100, True), (4, 200, False)]
)
def test_sequences_that_devices_share(small_blocks, devices, window, packed):
    """Chunks of one block or two; the gradients too, at the places where they are held. A window of 200 reaches two."""
    layout, order = layout_of(context=devices), position_order(1024, devices)
    heads = enumerate((2, 1, 1, 2))
    q, k, v, by_output = (jax.random.normal(jax.random.key(seed), (1, 1024, count, 8)) for seed, count in heads)
    segments = jnp.arange(1024)[None] // 300 if packed else None

    def gradients(attend, q, k, v, segments, by_output):
        output, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, segments, window), q, k, v)
        return output, *pullback(by_output)

    spec, ids = (layout.spec((BATCH, POSITION, *rest), layout.compute) for rest in (("heads", "size"), ()))
    ours = partial(gradients, Splash(V5E, interpret=True, devices=devices))
    shared = layout.shard_map(ours, (spec, spec, spec, ids, spec), (spec,) * 4)
    arrays = q, k, v, segments, by_output
    found = jax.jit(shared)(*(None if x is None else x[:, order] for x in arrays))
    expected = jax.jit(partial(gradients, PLAIN.attend))(*arrays)
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(left, right[:, order], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("chunk", "starts", "window"), [(1024, (0,), None), (256, (0, 768, 256, 512), None), (128, (256, 640), 200)]
)
def test_a_blocks_visibility_is_that_of_all_its_scores(chunk, starts, window):
    mask = Mask(chunk, starts, 1024, window)
    for queries, keys in np.ndindex(mask.shape[0] // 128, 16):
        rows, columns = slice(queries * 128, (queries + 1) * 128), slice(keys * 64, (keys + 1) * 64)
        scores = mask.mask_function(mask.q_sequence[rows, None], np.arange(1024)[None, columns])
        assert (mask[rows, columns].any(), mask[rows, columns].all()) == (scores.any(), scores.all())


@pytest.mark.parametrize(
    ("kind", "length", "window", "expected"),
    [
        (V5E, 8192, None, Blocks(8192, 1024, 512, 2048, fused=True)),
        (V6E, 8192, None, Blocks(8192, 2048, 512, 2048, fused=True)),
        (V6E, 4096, None, Blocks(4096, 1024, 512, 2048, fused=True)),
        (V5E, 7168, None, Blocks(7168, 1024, 512, 1024, fused=True)),
        (V5E, 2048, None, Blocks(2048, 1024, 512, 1024, fused=True)),
        (V5E, 32768, None, Blocks(32768, 1024, 512, 1024, fused=False)),
        (V6E, 32768, 4096, Blocks(32768, 2048, 512, 2048, fused=False)),
        (V5E, 8192, 4096, Blocks(8192, 1024, 512, 1024, fused=True)),
        (V5E, 8192, 600, Blocks(8448, 768, 384, 768, fused=True)),
        (V5E, 8192, 3, Blocks(8192, 512, 512, 512, fused=True)),
        (V5E, 1500, None, Blocks(1536, 768, 384, 768, fused=True)),
        (V5E, 1, None, Blocks(128, 128, 128, 128, fused=True)),
        (V5E, 200, None, Blocks(256, 256, 256, 256, fused=True)),
    ],
)
def test_blocks_by_chip_length_and_window(kind, length, window, expected):
    assert blocks_for(kind, length, window) == expected


@pytest.mark.parametrize(("kind", "size"), [(V5E, 512), (V6E, 1024)])
def test_blocks_of_wide_heads_are_half_as_long(kind, size):
    """With 1,024 rows the backward kernel of v5e takes 16.6 of 16 MiB of vector memory."""
    assert blocks_for(kind, 16384, None, 256) == Blocks(16384, size, 512, size, fused=False)
    assert blocks_for(kind, 16384, None, 128).size == 2 * size


@pytest.mark.parametrize("window", [None, 700, 1_000_000])
def test_blocks_take_any_length_and_little_is_filled_up(window):
    for length in [*range(1, 400, 7), *range(400, 40_000, 1237)]:
        found = blocks_for(V5E, length, window)
        assert found.length % found.size == found.size % found.compute == found.compute % sizes.LANES == 0
        assert found.length % found.backward == found.backward % found.size == 0
        assert length <= found.length
        assert found.length - length < 2 * sizes.LANES * (length // found.size + 1)
