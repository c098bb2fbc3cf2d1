"""What is decided from shapes about embedding and head."""

import pytest

from gregale.axes.vocabulary import exchanges_rows, loss_blocks


def test_the_form_that_sends_less_is_taken():
    """8,192 tokens of an 8B model on 64 devices are far fewer than its rows; of a byte model they are more."""
    assert exchanges_rows(tokens=8192, embed=4096, vocabulary=128256, width=2, devices=64)
    assert not exchanges_rows(tokens=8192, embed=4096, vocabulary=256, width=2, devices=64)
    assert not exchanges_rows(tokens=8192, embed=4096, vocabulary=128256, width=2, devices=1), "nothing is sent"
    assert not exchanges_rows(tokens=1000, embed=1, vocabulary=2000, width=4, devices=64), "ids weigh more than rows"


def test_one_group_where_it_takes_no_more_than_a_table_of_float32():
    """An 8B model in bfloat16: 2 * 4,096 tokens have gradients by logits of the table's bytes."""
    assert loss_blocks(tokens=8192, embed=4096, width=2, block=1024) == (1, 8, 1024)
    assert loss_blocks(tokens=8192, embed=4096, width=2, block=5000) == (1, 2, 5000), "the last one is filled up"
    assert loss_blocks(tokens=100, embed=4096, width=2, block=1024) == (1, 1, 100)


@pytest.mark.parametrize(
    ("tokens", "width", "block", "found"),
    [
        (32768, 2, 1024, (8, 4, 1024)),  # half of the table's memory
        (32768, 4, 1024, (16, 2, 1024)),  # of which each gradient takes more
        (32768, 2, 256, (32, 4, 256)),  # four blocks, so that a smaller block takes less in all
        (32768, 2, 8192, (4, 1, 8192)),  # one block in any case
        (9000, 2, 1024, (3, 3, 1024)),
    ],
)
def test_more_tokens_come_in_groups(tokens, width, block, found):
    blocks = loss_blocks(tokens, 4096, width, block)
    assert blocks == found
    assert tokens <= blocks.tokens < tokens + blocks.groups * block
