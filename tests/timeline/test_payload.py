"""Bytes on the wire by codec."""

import pytest

from gregale.errors import UserError
from gregale.timeline.payload import PAYLOADS, Payload, bytes_per_parameter


@pytest.mark.parametrize(
    ("codec", "expected"),
    [("float32", 4), ("bfloat16", 2), ("int8", 1 + 2 / 64), ("int4", 0.5 + 2 / 64), ("e3m0", 0.53125), ("4bit", 0.5)],
)
def test_bytes_per_parameter(codec, expected):
    assert bytes_per_parameter(codec) == expected


def test_bytes_of_a_million_values_counted_block_by_block():
    values, block = 64 * 15_625, 64
    counted = sum(block * 4 // 8 + 2 for _ in range(values // block))
    assert Payload(bits=4, block=64, scale_bits=16).bytes_per_parameter * values == counted


def test_an_unknown_codec_lists_the_choices():
    with pytest.raises(UserError, match="codec: 'int5' is not a known wire format; choose one of float32, bfloat16"):
        bytes_per_parameter("int5")
    assert "int5" not in PAYLOADS
