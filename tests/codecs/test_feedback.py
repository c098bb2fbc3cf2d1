"""What is kept between steps: its 8-bit form, and what error feedback promises."""

from functools import partial

import jax
import numpy as np
import pytest

from gregale.codecs.codec import ReduceConfig, load, store, stored_block
from tests.codecs.wire_format import round_trip


@pytest.mark.parametrize(("size", "block"), [(1, 1), (64, 64), (96, 96), (128, 64), (13, 13), (509, 509), (1536, 64)])
def test_stored_blocks_divide_the_last_axis(size, block):
    assert stored_block(size) == block


def test_stored_as_eight_bits():
    values = np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32)
    stored = jax.jit(partial(store, block=stored_block(values.shape[-1])))(values)
    assert stored.codes.dtype == "uint8"
    assert stored.codes.shape == (3, 128)
    assert stored.scales.dtype == "bfloat16"
    assert stored.scales.shape == (3, 2)
    np.testing.assert_array_equal(load(stored), round_trip("int8", values))


@pytest.mark.parametrize(("codec", "beta"), [("int4", 0.0), ("e3m0", 0.8)])
def test_what_was_sent_is_what_went_in_less_the_error_kept(codec, beta):
    """sum of sent = sum of gone in - (e_K - e_0) / (1 - beta), with the error kept in float32."""
    random, codec = np.random.default_rng(1), ReduceConfig(codec=codec).first_codec()
    step = jax.jit(lambda h: codec.decode(codec.encode(h), 100))
    start = error = random.normal(size=100).astype(np.float32) * 0.1
    gone_in, sent = np.zeros(100), np.zeros(100)
    for _ in range(30):
        gradient = random.normal(size=100).astype(np.float32) + 0.5
        compensated = gradient + error
        message = np.asarray(step(compensated))
        error = codec.next_error(error, compensated - message, beta)
        gone_in, sent = gone_in + gradient, sent + message
    expected = gone_in - (np.asarray(error, float) - start) / (1 - beta)
    assert np.linalg.norm(sent - expected) <= 1e-5 * np.linalg.norm(gone_in)
    assert np.linalg.norm(sent - gone_in) > 1e-4 * np.linalg.norm(gone_in), "the error itself must be seen by the check"
