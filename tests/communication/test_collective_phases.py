"""One message of many arrays."""

import jax
import numpy as np

from gregale.communication.collective_phases import decode_all, encode_all
from tests.codecs.test_wire_format import codec_of
from tests.codecs.wire_format import round_trip


def test_one_message_of_many_arrays():
    codec, sizes = codec_of("int4"), [1, 61, 131]
    many = [np.random.default_rng(size).normal(size=(2, size)).astype(np.float32) for size in sizes]
    message = jax.jit(lambda arrays: encode_all(arrays, codec))(many)
    assert message.shape == (2, sum(map(codec.message_bytes, sizes)))
    decoded = jax.jit(lambda message: decode_all(message, sizes, codec))(message)
    for array, got in zip(many, decoded, strict=True):
        np.testing.assert_array_equal(got, round_trip("int4", array))
