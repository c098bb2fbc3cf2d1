"""Sizes of messages in closed form."""

import pytest

from gregale.codecs.config import ReduceConfig
from gregale.codecs.formats import CODECS, bytes_per_parameter, wire_format


@pytest.mark.parametrize(
    ("codec", "expected"),
    [("none", 4), ("bfloat16", 2), ("int8", 1.03125), ("int4", 0.53125), ("int2", 0.28125), ("e3m0", 0.53125)],
)
def test_bytes_per_parameter(codec, expected):
    assert bytes_per_parameter(codec) == expected


def test_a_message_is_counted_block_by_block():
    assert wire_format("int4").message_bytes(64) == 34
    assert wire_format("int4").message_bytes(65) == 68
    assert wire_format("int2", block=12).message_bytes(25) == 3 * (3 + 2)
    assert wire_format("bfloat16").message_bytes(25) == 50


@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_reports_the_format_of_its_name(codec):
    assert ReduceConfig(codec=codec, block=32).first_codec().format == wire_format(codec, 32)
