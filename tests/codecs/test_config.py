"""What a user can ask of the reduction, what is refused, and the sizes of messages in closed form."""

import pytest

from gregale.codecs.codec import (
    CODECS,
    FeedbackConfig,
    FloatCodec,
    PowersCodec,
    ReduceConfig,
    RotatedCodec,
    UniformCodec,
    wire_format,
)
from gregale.errors import UserError


def test_codecs_of_the_legs():
    config = ReduceConfig(codec="e3m0", block=32, gather_codec="int8")
    assert config.first_codec() == PowersCodec(block=32)
    assert config.second_codec() == UniformCodec(8, 32)
    rotated = ReduceConfig(codec="int4", gather_codec="bfloat16", hadamard=True)
    assert (rotated.first_codec(), rotated.second_codec()) == (RotatedCodec(UniformCodec(4)), FloatCodec("bfloat16"))
    assert ReduceConfig().first_codec() == FloatCodec("none")
    assert not ReduceConfig().quantised
    assert ReduceConfig(codec="bfloat16").quantised
    assert ReduceConfig(gather_codec="int8").quantised


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReduceConfig(codec="int5"), r"codec is 'int5'. Did .* Valid choices: none, bfloat16, int8, int4"),
        (lambda: ReduceConfig(gather_codec="e3m0"), r"gather_codec is 'e3m0'. Valid choices: none, bfloat16"),
        (lambda: ReduceConfig(codec="int4", block=63), r"reduce.block is 63: int4 packs 2 .* 64 would work"),
        (lambda: ReduceConfig(codec="int2", block=0), r"block is 0; it has to be at least 1"),
        (lambda: ReduceConfig(hadamard=True), r"no blocks to rotate"),
        (lambda: ReduceConfig("int8", block=96, hadamard=True), r"power of two; 64 or 128 would work"),
        (lambda: FeedbackConfig(beta=1.0), r"beta is 1; it has to be at least 0 and below 1"),
        (lambda: FeedbackConfig(reset_every=0), r"reset_every is 0; it has to be at least 1, or null: never"),
    ],
)
def test_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_defaults_are_equal_to_what_a_run_wrote_when_they_were_values():
    written = ReduceConfig(block=64, gather_codec="none", feedback=FeedbackConfig(beta=0.8))
    assert ReduceConfig().resolved == written == written.resolved


def test_bytes_per_parameter():
    expected = {
        "none": 4,
        "bfloat16": 2,
        "int8": 1.03125,
        "int4": 0.53125,
        "int2": 0.28125,
        "e3m0": 0.53125,
        "topk": 112 / 4096,
    }
    assert {codec: wire_format(codec).bytes_per_parameter for codec in CODECS} == expected
    one = ReduceConfig(codec="int4", phases=1)
    assert one.bytes_per_parameter(8) * 2 * 7 / 8 == 7 * expected["int4"], "a message to each of seven others"
    assert ReduceConfig(codec="int4", gather_codec="int4").bytes_per_parameter(8) == expected["int4"]
    for codec in CODECS:
        assert ReduceConfig(codec=codec, block=32).first_codec().format == wire_format(codec, 32)
