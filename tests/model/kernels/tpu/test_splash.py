"""The splash kernels, step by step on a CPU, against the plain form; and how rows are cut into blocks."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from gregale.axes.layout import BATCH, POSITION
from gregale.axes.parameters import position_order
from gregale.model.kernels.cpu import cpu_kernels
from gregale.model.kernels.operations import PLAIN
from gregale.model.kernels.tpu import blocks as sizes
from gregale.model.kernels.tpu.attention_block_grid import (
    DIAGONAL,
    EDGE,
    NOTHING,
    WHOLE,
    Pairs,
    Step,
    _by_keys,
    _by_rows,
)
from gregale.model.kernels.tpu.blocks import Limits, blocks_for, shared_blocks
from gregale.model.kernels.tpu.splash import Splash
from tests.mesh.support import layout_of
from tests.model.kernels.forms import assert_equal

V5E, V6E = "TPU v5 lite", "TPU v6 lite"
CPU = cpu_kernels()
# A simulated TPU: scratch begins as NaN, transfers end when they are awaited, and races are errors.
LIKE_A_TPU = pltpu.InterpretParams(uninitialized_memory="nan", dma_execution_mode="on_wait", detect_races=True)
SPLASH = replace(PLAIN, attention="splash", opaque=True, attend=Splash(V5E, interpret=True))
SIMULATED = replace(SPLASH, attend=Splash(V5E, interpret=LIKE_A_TPU))
# Beside the plain form's own roundings: of queries after they are scaled, of the output of which the backward pass
# takes the sum.
BFLOAT16_ROUNDING = 5e-3


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks a row, in rows that are short enough to be interpreted."""
    monkeypatch.setitem(sizes.LIMITS, V5E, Limits(128, None, 2 * 512 * sizes.LANES * 4))
    monkeypatch.setattr(sizes, "FEWEST_IN_WINDOW", 128)


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

    assert_equal(form, SIMULATED if heads[1] == 2 else SPLASH, (q, k, v), dtype, BFLOAT16_ROUNDING)


def test_attention_with_sinks(small_blocks):
    shapes = ((2, 200, 2, 8), (2, 200, 1, 8), (2, 200, 1, 8), (2, 200, 2, 1))
    arrays = tuple(2 * jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(shapes))
    segments = jnp.broadcast_to(jnp.arange(200) // 90, (2, 200))

    def form(kernels):
        return lambda q, k, v, sinks: kernels.attend(q, k, v, segments, 70, None, sinks)

    assert_equal(form, SPLASH, arrays, jnp.float32)


@pytest.mark.parametrize("form", [Splash(V5E, interpret=LIKE_A_TPU).with_largest, CPU.attend_with_largest])
def test_the_largest_scores_of_queries(small_blocks, form):
    """Of an odd length, in several blocks: NumPy's over all keys that a query sees; sinks are none of them."""
    random, window = np.random.default_rng(0), 70
    q, k, v = (random.normal(size=(2, 300, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    segments = np.sort(random.integers(0, 4, (2, 300)), axis=1)
    sinks = np.full((2, 300, 4, 1), 1e3, np.float32)
    output, largest = jax.jit(form, static_argnums=(4, 5))(q, k, v, segments, window, None, sinks)
    scores = np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, 2, axis=2)) / 4
    back = np.arange(300)[:, None] - np.arange(300)
    sees = (segments[:, :, None] == segments[:, None]) & (back >= 0) & (back < window)
    expected = np.where(sees[:, None], scores, -np.inf).max(-1)
    np.testing.assert_allclose(largest, expected.swapaxes(1, 2), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(output, PLAIN.attend(q, k, v, segments, window, None, sinks), atol=1e-5)


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


@pytest.mark.parametrize(("devices", "window"), [(1, None), (1, 128), (2, None), (4, 300), (2, 100)])
def test_pairs_are_the_visible_blocks_and_each_sum_is_written_once(devices, window):
    """In both orders; a block of gradients by queries is not written again after it is complete."""
    pairs, order, heads = Pairs(1024, 64, devices, window), position_order(1024, devices).reshape(16, 64), 2
    for device, rows in enumerate(np.split(order, devices)):
        back = rows[:, :, None, None] - np.arange(1024).reshape(16, 64)
        seen = ((back >= 0) & (back < (window or 1024))).transpose(0, 2, 1, 3).reshape(len(rows), 16, -1)
        below = np.tril(np.ones((64, 64), bool)).reshape(-1)
        kinds = np.select([seen.all(2), (seen == below).all(2), seen.any(2)], [WHOLE, DIAGONAL, EDGE], NOTHING)
        by_rows, by_keys = read(_by_rows(pairs)[device]), read(_by_keys(pairs, heads)[device])
        for table, head in ((by_rows, 0), *((by_keys, head) for head in range(heads))):
            chosen = (table.kind != NOTHING) & (table.head == head)
            found = np.full_like(kinds, NOTHING)
            found[table.row[chosen], table.key[chosen]] = table.kind[chosen]
            np.testing.assert_array_equal(found, kinds)
            assert chosen.sum() == (kinds != NOTHING).sum(), "each once"
        starts = [index for index, first in enumerate(by_keys.first) if first]
        assert list(by_keys.key[starts]) == list(by_keys.key[by_keys.last]) == list(range(16)), (
            "keys without a query too"
        )
        assert list(by_rows.row[by_rows.first]) == list(by_rows.row[by_rows.last]) == list(range(len(rows)))
        of_queries = by_keys.head * pairs.rows + by_keys.row
        for block in range(heads * pairs.rows):
            mine = np.flatnonzero((of_queries == block) & (by_keys.kind != NOTHING))
            assert np.flatnonzero(by_keys.opens & (of_queries == block)) == mine[:1]
            (closed,) = np.flatnonzero(by_keys.closes & (of_queries == block))
            assert closed == mine[-1]
            assert by_keys.output[closed] == block
            later = by_keys.output[closed:] == block
            assert not np.any(np.diff(later.astype(int)) > 0)


def read(table: np.ndarray) -> Step:
    return Step.of(np.append(table, 0), np.arange(len(table) // 3))


@pytest.mark.parametrize(
    ("kind", "length", "window", "expected"),
    [
        (V5E, 8192, None, (8192, 2048)),
        (V6E, 4096, None, (4096, 2048)),
        ("another", 4096, None, (4096, 1024)),
        (V5E, 7168, None, (7168, 1792)),
        (V6E, 32768, 4096, (32768, 2048)),
        (V5E, 8192, 600, (8448, 768)),
        (V5E, 8192, 3, (8192, 512)),
        (V5E, 1500, None, (1536, 1536)),
        (V5E, 1, None, (128, 128)),
        (V5E, 200, None, (256, 256)),
    ],
)
def test_blocks_by_chip_length_and_window(kind, length, window, expected):
    found = blocks_for(kind, length, window)
    assert (found.length, found.block.size) == expected


def test_blocks_of_wide_heads_are_half_as_long():
    assert [blocks_for(V5E, 16384, None, head_size).block.size for head_size in (128, 136, 256)] == [2048, 1024, 1024]


def test_a_pass_is_fused_while_the_gradients_of_a_group_of_heads_fit():
    assert [blocks_for(V5E, length, None, 128, 4).fused for length in (8192, 32768, 65536)] == [True, True, False]
    assert [blocks_for(V5E, 32768, None, *shape).fused for shape in ((64, 4), (256, 4), (128, 8))] == [
        True,
        False,
        False,
    ]
    assert shared_blocks(V5E, 16, 8192, None, 128, 4).fused, "of own queries"


@pytest.mark.parametrize("window", [None, 700, 1_000_000])
def test_blocks_take_any_length_and_little_is_filled_up(window):
    for length in [*range(1, 400, 7), *range(400, 40_000, 1237)]:
        found = blocks_for(V5E, length, window)
        block = found.block
        assert found.length % block.size == 0
        assert block.size % block.compute == block.size % block.diagonal == 0
        assert block.compute % sizes.LANES == block.diagonal % sizes.LANES == 0
        assert length <= found.length
        assert found.length - length < 2 * sizes.LANES * (length // block.size + 1)
