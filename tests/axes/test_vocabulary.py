"""What is decided from shapes about embedding and head."""

from random import Random

import pytest

from gregale.axes.parameters import exchanges_rows, loss_blocks


def test_the_form_that_sends_less_is_taken():
    """8,192 tokens of an 8B model on 64 devices are far fewer than its rows; of a byte model they are more."""
    assert exchanges_rows(tokens=8192, embed=4096, vocabulary=128256, width=2, devices=64)
    assert not exchanges_rows(tokens=8192, embed=4096, vocabulary=256, width=2, devices=64)
    assert not exchanges_rows(tokens=8192, embed=4096, vocabulary=128256, width=2, devices=1), "nothing is sent"
    assert not exchanges_rows(tokens=1000, embed=1, vocabulary=2000, width=4, devices=64), "ids weigh more than rows"


def test_one_group_where_it_takes_no_more_than_a_table_of_float32():
    """An 8B model in bfloat16: 2 * 4,096 tokens have gradients by logits of the table's bytes."""
    assert loss_blocks(tokens=8192, embed=4096, width=2, block=1024) == (1, 8, 1024)
    assert loss_blocks(tokens=8192, embed=4096, width=2, block=5000) == (1, 2, 4096), "both are equally long"
    assert loss_blocks(tokens=100, embed=4096, width=2, block=1024) == (1, 1, 100)


@pytest.mark.parametrize(
    ("tokens", "width", "block", "found"),
    [
        (32768, 2, 1024, (8, 4, 1024)),  # half of the table's memory
        (32768, 4, 1024, (16, 2, 1024)),  # of which each gradient takes more
        (32768, 2, 256, (32, 4, 256)),  # four blocks, so that a smaller block takes less in all
        (32768, 2, 8192, (4, 1, 8192)),  # one block in any case
        (9000, 2, 1024, (3, 3, 1024)),
        (9500, 2, 1024, (3, 4, 832)),  # blocks of 792 are filled up to a multiple of 64
    ],
)
def test_more_tokens_come_in_groups(tokens, width, block, found):
    blocks = loss_blocks(tokens, 4096, width, block)
    assert blocks == found
    assert tokens <= blocks.tokens < tokens + blocks.groups * block


def test_groups_of_any_size_have_little_padding_and_keep_their_limits():
    """Less than an eighth is padding, and gradients by logits take at most half of a table, or one block."""
    random = Random(0)
    for _ in range(5000):
        tokens, embed, block = (random.randint(16, most) for most in (70_000, 9_000, 3_000))
        width, fused = random.choice((2, 4)), random.random() < 0.5
        found = loss_blocks(tokens, embed, width, block, fused)
        assert tokens <= found.tokens < 1.125 * tokens, (tokens, embed, width, block, fused)
        if found.groups > 1:
            assert found.group <= max(block, embed * 2 // width), (tokens, embed, width, block, fused)
        assert found.block <= block or (fused and found.blocks == 1)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("embed", [1152, 1536, 1600, 2048, 2304, 2560, 4096])
def test_widths_of_public_models_have_little_padding(embed, fused):
    assert loss_blocks(32768, embed, 2, 1024, fused).tokens <= 1.04 * 32768
