"""Attention of sequences that four devices share: values and gradients of plain attention."""

from functools import partial

import jax
import numpy as np
import pytest

from gregale.axes.layout import BATCH, POSITION
from gregale.axes.parameters import chunks_reached, position_order
from gregale.model.kernels.blocked import Blocks, Gathered
from gregale.model.kernels.operations import PLAIN
from tests.mesh.support import layout_of

LENGTH, DEVICES = 64, 4  # chunks of 8, in two blocks


@pytest.mark.parametrize(
    ("window", "cap", "packed", "has_sinks"),
    [(None, None, False, False), (None, 2.0, True, False), (12, None, True, True), (20, None, False, False)],
)
def test_it_is_plain_attention(window, cap, packed, has_sinks):
    random = np.random.default_rng(0)
    q, k, v, by_output = (random.normal(size=(2, LENGTH, heads, 4)).astype(np.float32) for heads in (4, 2, 2, 4))
    sinks = random.normal(size=(2, LENGTH, 4, 1)).astype(np.float32) if has_sinks else None
    segments = np.sort(random.integers(0, 5, (2, LENGTH)), axis=1) if packed else None
    layout, order = layout_of(context=DEVICES), position_order(LENGTH, DEVICES)
    spec, ids = (layout.spec((BATCH, POSITION, *rest), layout.compute) for rest in (("heads", "size"), ()))

    def gradients(attend, q, k, v, sinks, segments, by_output):
        def call(q, k, v, sinks):
            return attend(q, k, v, segments, window, cap, sinks)

        output, pullback = jax.vjp(call, q, k, v, sinks)
        return output, *(x for x in pullback(by_output) if x is not None)

    inputs, outputs = (spec, spec, spec, spec, ids, spec), (spec,) * (5 if has_sinks else 4)
    shared = layout.shard_map(partial(gradients, Gathered(DEVICES, rows=4)), inputs, outputs)
    arrays = q, k, v, sinks, segments, by_output
    found = jax.jit(shared)(*(None if x is None else x[:, order] for x in arrays))
    expected = jax.jit(partial(gradients, PLAIN.attend))(*arrays)
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(left, right[:, order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 100])
def test_devices_have_equal_work(window):
    """The pairs of blocks that a device computes, those of visible keys only."""
    pairs = Blocks.of_chunks(1024, DEVICES, 512, window, chunks_reached(1024, DEVICES, window)).pairs()
    seen = (pairs[..., 3] <= pairs[..., 2]).sum(1)
    assert seen.max() - seen.min() <= (0 if window is None else 1)
    assert len(pairs[0]) == (2 * 4 * 2 * 2 + 2 if window is None else 8)


def test_scores_are_in_small_blocks_of_any_chunk():
    sizes = {8: 8, 600: 600, 1024: 512, 3125: 625, 8200: 410, 16_411: 16_411, 2**17: 1024}  # at most 1,024 blocks
    for chunk, size in sizes.items():
        assert Blocks.of_chunks(chunk, DEVICES, 512, None, None).size == size
