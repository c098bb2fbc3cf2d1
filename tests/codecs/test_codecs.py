"""Every codec, over a round trip: error bounds, signs, rows and bfloat16 values."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gregale.codecs.codec import BLOCK_BITS, CODECS
from tests.codecs.test_wire_format import codec_of, encode

SMALLEST = np.float32(2.0**-126)
SIZES = st.sampled_from([1, 131])  # few, as each is compiled once
NUMBERS = st.floats(-(2.0**127), 2.0**127, width=32)
MODERATE = st.floats(-1e6, 1e6, width=32)


@partial(jax.jit, static_argnames=("codec",))
def round_trip(values, codec):
    return codec.decode(codec.encode(values), values.shape[-1])


def vectors(numbers):
    return SIZES.flatmap(lambda size: arrays(np.float32, size, elements=numbers))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", CODECS)
def test_leading_dimensions_are_a_batch_and_bfloat16_values_are_floats(name):
    values, codec = normal(3, 2, 61).astype(ml_dtypes.bfloat16), codec_of(name)
    message = encode(values, codec)
    assert message.dtype == jnp.uint8
    assert message.shape == (3, 2, codec.message_bytes(61))
    decoded = round_trip(values, codec)
    assert decoded.dtype == jnp.float32
    np.testing.assert_array_equal(decoded[1, 1], round_trip(values[1, 1].astype(np.float32), codec))


@settings(max_examples=60)
@given(values=vectors(NUMBERS))
def test_e3m0_errs_by_a_third(values):
    decoded = np.asarray(round_trip(values, codec_of("e3m0")))
    for start in range(0, len(values), 64):
        part, got = values[start : start + 64].astype(float), decoded[start : start + 64].astype(float)
        largest = np.abs(part).max()
        bound = np.maximum(np.abs(part) / 3, largest / 128) + largest * 2**-8 + 8 * SMALLEST
        assert (np.abs(part - got) <= bound).all()


@pytest.mark.parametrize("name", BLOCK_BITS)
@settings(max_examples=40)
@given(values=vectors(MODERATE))
def test_no_value_changes_its_sign_and_none_grows_much(name, values):
    decoded = np.asarray(round_trip(values, codec_of(name)))
    assert (decoded * values >= 0).all()
    assert np.abs(decoded).max() <= np.abs(values).max() * (1 + 2**-8)
    if name in ("int4", "e3m0"):
        np.testing.assert_array_equal(round_trip(decoded, codec_of(name)), decoded)


def test_rotation_keeps_the_error_of_normal_values_and_shrinks_it_for_heavy_tails():
    def error(values, **options):
        decoded = round_trip(values, codec_of("int4", **options))
        return np.linalg.norm(decoded - values) / np.linalg.norm(values)

    even = normal(64 * 256)
    assert error(even, hadamard=True) == pytest.approx(error(even), rel=0.05)
    heavy = np.random.default_rng(0).standard_t(2, 64 * 256).astype(np.float32)
    assert error(heavy, hadamard=True) < 0.75 * error(heavy)


@settings(max_examples=30)
@given(values=vectors(MODERATE))
def test_rotated_blocks_come_back(values):
    decoded = round_trip(values, codec_of("int8", hadamard=True))
    padded = np.pad(values, (0, -len(values) % 64)).reshape(-1, 64)
    difference = np.pad(decoded - values, (0, -len(values) % 64)).reshape(-1, 64)
    bound = np.linalg.norm(padded, axis=1) * np.sqrt(64) / 128 + 1e-30
    assert (np.linalg.norm(difference, axis=1) <= bound).all()
