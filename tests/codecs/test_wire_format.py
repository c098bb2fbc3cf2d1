"""A codec written from the words of docs/quantised.md makes our messages, byte for byte, and reads them."""

import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from gregale.codecs.codec import BLOCK_BITS, CODECS, ReduceConfig, load, random_rotation, store, stored_block
from tests.codecs import wire_format

PAGE = Path(__file__).parents[2] / "docs" / "quantised.md"
ROWS = re.findall(r"^\| `(\w+)` \| (-?[\d.]+, [^|]+) \| `([0-9a-f ]+)` \|$", PAGE.read_text(), re.MULTILINE)
TINY = 2.0**-126
LARGEST = float(np.finfo(np.float32).max)
BLOCK = 64
SCALES = {"int8": 128, "int4": 8, "int2": 2, "e3m0": 8}


def codec_of(name, block=BLOCK, **options):
    return ReduceConfig(codec=name, block=block, **options).first_codec()


@partial(jax.jit, static_argnames=("codec",))
def encode(values, codec):
    return codec.encode(values)


@partial(jax.jit, static_argnames=("codec", "size"))
def decode(message, codec, size):
    return codec.decode(message, size)


def odd_blocks() -> np.ndarray:
    """Blocks that meet every rule of the format, float32 [block, 64]."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, (80, BLOCK), np.uint64).astype(np.uint32).view(np.float32)  # any float at all
    bits = np.where(np.isfinite(bits), bits, 0).astype(np.float32)
    exponents = random.integers(-148, 128, (80, 1)) + random.integers(-12, 1, (80, BLOCK))
    near = np.ldexp(random.normal(size=(80, BLOCK)), np.maximum(exponents, -149))
    halves = random.integers(-300, 300, (80, BLOCK)) / 2  # ties
    halves[:, 0] = np.resize([128, -128, 8, -8, 2, -2], 80)
    halves[40:] = np.clip(halves[40:], -8, 8)
    ties = np.resize([s * 1.5 * 2.0**k for k in range(-5, 3) for s in (1, -1)], (2, BLOCK))
    ties[:, :2] = [[8, -8], [-8, 7]]
    rows = [bits, near, halves, ties, *named_blocks()]
    with np.errstate(over="ignore"):
        found = np.concatenate([np.atleast_2d(row) for row in rows]).astype(np.float32)
    return np.clip(found, -LARGEST, LARGEST, where=~np.isnan(found) & ~np.isinf(found), out=found)


def named_blocks() -> list[np.ndarray]:
    some = np.random.default_rng(1).normal(size=BLOCK)

    def changed(**at):
        block = some.copy()
        for key, value in at.items():
            block[int(key[1:])] = value
        return block

    zeros = [np.zeros(BLOCK), -np.zeros(BLOCK), np.resize([0.0, -0.0], BLOCK)]
    subnormal = [np.resize([1e-40, -1e-40, 0.0], BLOCK), np.resize([TINY * 0.99, -1e-45, TINY], BLOCK)]
    equal = [changed(_0=5, _9=-5), changed(_0=-5, _9=5), np.resize([3.3, -3.3], BLOCK)]
    bad = [changed(_3=value) for value in (np.nan, np.inf, -np.inf)] + [np.full(BLOCK, np.nan)]
    edges = [factor * TINY for factor in (1, 2, 8, 128, 1.999, 7.999, 127.99, 1.01)]
    edges += [2.0**127, 2.0**127 * (1 + 2**-23), (2 - 2**-7) * 2.0**127, (2 - 2**-8) * 2.0**127, LARGEST]
    ends = [np.linspace(-1, 1, BLOCK) * sign * edge for edge in edges for sign in (1, -1)]
    return [*zeros, *subnormal, *equal, *bad, *ends]


BLOCKS = odd_blocks()


@pytest.mark.parametrize("name", CODECS)
def test_messages_are_equal_byte_for_byte(name):
    found = np.asarray(encode(BLOCKS, codec_of(name)))
    for values, message in zip(BLOCKS, found, strict=True):
        assert message.tobytes() == wire_format.encode(name, values.tolist()), values


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_shows_in_each_of_many_blocks_and_nowhere_else(name):
    """XLA's maximum of floats forgets NaN on CPUs once there are some 50 rows."""
    values = np.random.default_rng(4).normal(size=(BLOCK, 3 * BLOCK)).astype(np.float32)
    at = np.arange(BLOCK), BLOCK + np.arange(BLOCK)
    values[at] = np.resize([np.nan, np.inf, -np.inf], BLOCK)
    decoded = np.asarray(decode(encode(values, codec_of(name)), codec_of(name), 3 * BLOCK))
    if name in BLOCK_BITS:
        assert np.isnan(decoded[:, BLOCK : 2 * BLOCK]).all()
    assert not np.isfinite(decoded[at]).any()
    assert np.isfinite(decoded[:, :BLOCK]).all()
    assert np.isfinite(decoded[:, 2 * BLOCK :]).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("size", "block"), [(1, 20), (83, 20), (203, 4), (203, 128)])
def test_padding_and_other_blocks(name, size, block):
    values = np.random.default_rng(2).normal(size=size).astype(np.float32)
    values[0] = 7
    codec = codec_of(name, block)
    message = encode(values, codec)
    assert np.asarray(message).tobytes() == wire_format.encode(name, values.tolist(), block)
    np.testing.assert_array_equal(decode(message, codec, size), wire_format.round_trip(name, values, block))


@pytest.mark.parametrize("name", CODECS)
def test_what_is_decoded_is_equal_to_the_last_bit(name):
    messages = np.asarray(encode(BLOCKS, codec_of(name)))
    found = np.asarray(decode(messages, codec_of(name), BLOCK))
    expected = [wire_format.decode(name, message.tobytes(), BLOCK) for message in messages]
    kept = ~np.isnan(found)
    np.testing.assert_array_equal(np.isnan(expected), ~kept)
    np.testing.assert_array_equal(found[kept].view(np.uint32), np.float32(expected)[kept].view(np.uint32))


@pytest.mark.parametrize(("name", "values", "message"), ROWS)
def test_the_examples_of_the_page(name, values, message):
    numbers = np.float32([float(value) for value in values.split(",")]).tolist()
    expected = bytes.fromhex(message)
    assert wire_format.encode(name, numbers, block=4) == expected
    assert np.asarray(encode(np.float32(numbers), codec_of(name, block=4))).tobytes() == expected


def test_the_page_has_the_signs_and_examples_of_every_block_codec():
    assert {name for name, _, _ in ROWS} == set(BLOCK_BITS)
    assert f"0x{wire_format.SIGNS_OF_64:016x}" in PAGE.read_text()
    assert list(np.random.default_rng(0).choice([-1, 1], BLOCK)) == wire_format.signs_of_64()


@pytest.mark.parametrize("name", BLOCK_BITS)
@pytest.mark.parametrize("block", [4, 64])
def test_rotated_integers_are_equal_byte_for_byte(name, block):
    values = np.random.default_rng(3).integers(-(2**15), 2**15, 150).astype(np.float32)
    signs = wire_format.signs_of_64()[:block]
    message = wire_format.encode(name, wire_format.rotated(values.tolist(), block, signs), block)
    assert np.asarray(encode(values, codec_of(name, block, hadamard=True))).tobytes() == message


def test_the_rotation_is_that_of_the_words():
    turned = wire_format.rotated(np.eye(BLOCK).ravel().tolist(), BLOCK, wire_format.signs_of_64())
    np.testing.assert_array_equal(np.reshape(turned, (BLOCK, BLOCK)), random_rotation(BLOCK))


def blocks_between_scales() -> np.ndarray:
    """Blocks whose scale is rounded in every way, with values all over and one at the end opposite to x_max."""
    tops = np.float32(np.linspace(128, 256, 2048, endpoint=False))[:, None] * np.float32([[[1]], [[-1]]])
    return (tops * np.float32([1, *np.linspace(-0.9999, 1, BLOCK - 1)])).reshape(-1, BLOCK)


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_the_bounds_of_the_page_hold_and_clipping_reaches_its_own(name):
    values = blocks_between_scales()
    codec, levels = codec_of(name), SCALES[name]
    messages = np.asarray(encode(values, codec))
    decoded = np.asarray(decode(messages, codec, BLOCK)).astype(float)
    scales = np.abs(np.array([wire_format.bfloat16_value(int.from_bytes(m[-2:], "little")) for m in messages.copy()]))
    error = np.abs(values - decoded) / scales[:, None]
    clipped = (np.sign(values) == -np.sign(values[:, :1])) & (np.abs(values) > (levels - 1) * scales[:, None])
    assert error[~clipped].max() <= max(0.5, levels * 2**-8) + levels * 2**-21
    assert error[clipped].max() <= 1 + levels * 2**-8 + levels * 2**-21
    assert error[clipped].max() >= 0.99 * (1 + levels * 2**-8), "the bound is reached, nearly"


def test_the_stored_errors_bound_holds_and_is_nearly_reached():
    values = blocks_between_scales()
    stored = jax.jit(partial(store, block=stored_block(values.shape[-1])))(values)
    error = np.abs(values - np.asarray(load(stored))) / np.abs(values[:, :1])
    opposite = (np.sign(values) != np.sign(values[:, :1])) & (np.abs(values) > 126 / 128 * np.abs(values[:, :1]))
    assert error[~opposite].max() <= (1 + 2**-8) / 256 * (1 + 2**-12)
    assert 0.98 * 3 / 256 <= error.max() <= 3 / 256


def test_bfloat16_errs_by_a_256th_of_the_value_at_most():
    values = np.float32(np.linspace(1, 2, 1 << 16))
    decoded = np.asarray(decode(encode(values, codec_of("bfloat16")), codec_of("bfloat16"), values.size))
    assert 0.99 * 2**-8 <= (np.abs(decoded - values) / values).max() <= 2**-8
