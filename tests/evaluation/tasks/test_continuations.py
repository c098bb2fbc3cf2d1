"""Which tokens are given and which are scored."""

import json

import numpy as np
import pytest

from gregale.data.tokenizer_training import train_bpe
from gregale.data.tokenizers import BpeConfig, BytesTokenizer, LibraryTokenizer, Tokenizer
from gregale.evaluation.tasks import Continuation, Pair, encoded, filled

END = BytesTokenizer.end_of_document


def split(tokenizer: Tokenizer, context: str, continuation: str, start=()) -> tuple[list[int], list[int]]:
    ((tokens, scored),) = encoded([Pair(context, continuation)], tokenizer, start)
    cut = len(tokens) - scored
    return tokens[:cut].tolist(), tokens[cut:].tolist()


def test_tokens_that_are_given_and_scored():
    tokenizer = BytesTokenizer()
    assert split(tokenizer, "ab \n", "c") == (list(b"ab"), list(b" \nc")), "white space goes with the continuation"
    for context in ("", " "):  # without a context the end of a document is given
        assert split(tokenizer, context, "c") == ([END], list(f"{context}c".encode()))
    assert split(tokenizer, "a", "b", start=(7, 8)) == ([7, 8, *b"a"], list(b"b")), "tokens before every text"
    assert split(tokenizer, "", "b", start=(7,)) == ([7], list(b"b"))
    assert split(tokenizer, "na", "ïve 🌬") == (list(b"na"), list("ïve 🌬".encode()))


@pytest.fixture(scope="module")
def pairs() -> Tokenizer:
    """A tokenizer that makes one token of `ab` and of `abc`."""
    return train_bpe(BpeConfig(vocabulary=262), iter(["ab", "ab", "abc"] * 20))


def test_tokens_that_reach_over_the_boundary(pairs):
    (ab,) = pairs.encode("ab").tolist()
    (abc,) = pairs.encode("abc").tolist()
    assert split(pairs, "ab", "cab")[0] == [ab]
    # `ab` + `cx` is `abc` and `x`: one token is the context's, so what is scored begins with the second
    assert split(pairs, "ab", "cx") == ([ab], pairs.encode("x").tolist())
    assert split(pairs, "ab", "c") == ([ab], []), f"{abc} is one token"


def test_the_start_of_a_tokenizer_is_what_its_rules_put_before_a_text(pairs):
    assert pairs.start == BytesTokenizer().start == ()
    library = dict(pairs.to_json()["library"])
    end = {"id": pairs.end_of_document, "type_id": 0}
    special = {"id": "<|end_of_document|>", "ids": [end["id"]], "tokens": ["<|end_of_document|>"]}
    template = [{"SpecialToken": {"id": special["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    library["post_processor"] = {
        "type": "TemplateProcessing",
        "single": template,
        "pair": template,
        "special_tokens": {special["id"]: special},
    }
    found = LibraryTokenizer(json.dumps(library), special["id"], "here")
    assert found.start == (pairs.end_of_document,)
    assert found.encode("ab").tolist() == pairs.encode("ab").tolist()


def test_rows_are_cut_from_the_left_and_filled_on_the_right():
    long, short = Continuation(np.arange(10, 20, dtype=np.int32), 2), Continuation(np.arange(3, dtype=np.int32), 1)
    rows = filled([long, short], 4)
    assert rows["tokens"].tolist() == [[15, 16, 17, 18], [0, 1, 0, 0]]
    assert rows["targets"].tolist() == [[16, 17, 18, 19], [1, 2, 0, 0]]
    assert rows["loss_mask"].tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert rows["positions"].tolist() == [[0, 1, 2, 3]] * 2
