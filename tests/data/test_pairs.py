"""Pairs of answers: their forms, and that the two rows of one stay together through splits, shuffles and mixtures."""

import json

import numpy as np
import pytest

from gregale.data.chat.conversation import Pair
from gregale.data.config import DataConfig
from gregale.data.preparation import Corpus, prepare
from gregale.data.sources import ChatSource, SourceConfig
from gregale.data.tokenizers import BytesTokenizer
from gregale.errors import UserError

L, COUNT, SIZE = 40, 40, 8
SYSTEM, USER, YES = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
NO, HI, RULES = ({**YES, "content": "n"}, {**YES, "content": "h"}, {**SYSTEM, "role": "developer"})


def source(path, rows, **options) -> ChatSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ChatSource(files=(str(path),), form="pairs", packing="pad", **options)


def pairs_of(letter: str, count: int = COUNT) -> list[dict]:
    return [{"prompt": f"{letter}{n}", "chosen": f"+{letter}{n}", "rejected": f"-{letter}{n}"} for n in range(count)]


def held_out(corpus: Corpus) -> list[str]:
    assert corpus.held_out is not None
    return names_of(corpus.held_out.rows(range(len(corpus.held_out))))


def names_of(rows: dict[str, np.ndarray]) -> list[str]:
    """The name of each pair of a batch, whose rows have to be the two answers, in order, to one prompt."""
    found = []
    for row, (tokens, targets, mask) in enumerate(zip(rows["tokens"], rows["targets"], rows["loss_mask"], strict=True)):
        *answer, end = targets[mask > 0].tolist()
        assert (bytes(answer[:1]), end) == (b"+-"[row % 2 :][:1], BytesTokenizer.end_of_document)
        found.append(bytes(answer[1:]).decode())
        assert bytes(tokens[: 5 + len(found[-1])].tolist()) == b"user\n" + found[-1].encode()
    assert found[::2] == found[1::2]
    return found[::2]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "u", "chosen": "a", "rejected": "n"}, [USER]),
        ({"prompt": "u", "chosen": [YES], "rejected": [NO], "system": "s"}, [SYSTEM, USER]),
        ({"prompt": [SYSTEM, USER], "chosen": [YES], "rejected": [NO]}, [SYSTEM, USER]),
        ({"prompt": "u", "chosen": [USER, YES], "rejected": [USER, NO]}, [USER]),
        ({"prompt": [HI, USER], "chosen": [HI, USER, YES], "rejected": [HI, USER, NO]}, [HI, USER]),
        ({"chosen": [RULES, USER, YES], "rejected": [RULES, USER, NO]}, [RULES, USER]),
        ({"prompt": "u", "chosen": [SYSTEM, USER, YES], "rejected": [SYSTEM, USER, NO], "system": "s"}, [SYSTEM, USER]),
    ],
)
def test_rows_are_two_conversations_with_one_prompt(tmp_path, row, prompt):
    (document,) = source(tmp_path / "a", [row]).documents()
    pair = document.content
    assert isinstance(pair, Pair)
    assert [json.loads(each.text)["messages"] for each in (pair.chosen, pair.rejected)] == [
        [*prompt, YES],
        [*prompt, NO],
    ]


def test_rows_without_a_pair_are_refused(tmp_path):
    both = {"chosen": [USER, YES], "rejected": [USER, NO]}
    wrong = {
        "`chosen` and `rejected` differ before": {**both, "rejected": [{**USER, "content": "other"}, NO]},
        "`chosen` and `rejected` begin with the text of `prompt`, and whether they repeat it": {
            "prompt": "Hello",
            "chosen": "Hello! How can I help?",
            "rejected": "Hello. What?",
        },
        "`prompt` is another one than the answers begin with": {**both, "prompt": "other"},
        "`system` is another text than the system's message": {
            "prompt": [SYSTEM, USER],
            "chosen": "a",
            "rejected": "n",
            "system": "t",
        },
    }
    for said, row in wrong.items():
        with pytest.raises(UserError, match=f"line 1: {said}"):
            list(source(tmp_path / "a", [row]).documents())
    rows = [
        *pairs_of("a"),
        {"chosen": [USER, YES], "rejected": [USER]},
        {"prompt": "u", "chosen": "a", "rejected": "a"},
    ]
    silent = source(tmp_path / "b", rows, on_bad_document="skip")
    corpus = prepare(DataConfig({"x": silent}, workers=1, cache=f"{tmp_path}/cache"), L, 0)
    assert f"{tmp_path}/b, line 41: `rejected` has no token that the loss is on." in "".join(corpus.notes)
    assert f"{tmp_path}/b, line 42: the chosen and the rejected answer are equal." in "".join(corpus.notes)
    equal = source(tmp_path / "b", [*rows[:40], rows[41]])  # stops no run
    corpus = prepare(DataConfig({"x": equal}, workers=1, cache=f"{tmp_path}/cache"), L, 0)
    assert corpus.notes[:2] == ("data.sources.x:", "  1 bad document(s) skipped:")


@pytest.mark.parametrize("mixtures", [[], [{"a": 1.0}, {"a": 1.0, "b": 3.0}]])
def test_pairs_stay_together(tmp_path, mixtures):
    sources: dict[str, SourceConfig] = {
        "a": source(tmp_path / "a", pairs_of("a")),
        "b": source(tmp_path / "b", pairs_of("b"), weight=2),
    }
    config = DataConfig(sources, workers=1, held_out=0.2, cache=f"{tmp_path}/cache", replica_mixtures=mixtures)
    corpus = prepare(config, L, 0)
    out = held_out(corpus)
    names = [name for step in range(60) for name in names_of(corpus.train.batch(step * SIZE, SIZE, range(SIZE)))]
    assert 4 < len(out) == len({*out}) < 30
    assert {*names} == {f"{letter}{n}" for letter in "ab" for n in range(COUNT)} - {*out}
    whole, part = (corpus.train.batch(24, SIZE, rows) for rows in (range(SIZE), [2, 3, 7]))
    assert all((part[key] == array[[2, 3, 7]]).all() for key, array in whole.items())


def test_a_few_pairs_hold_out_the_last(tmp_path):
    few = source(tmp_path / "a", pairs_of("a", 3))
    corpus = prepare(DataConfig({"a": few}, workers=1, cache=f"{tmp_path}/cache"), L, 0)
    assert held_out(corpus) == ["a2"]
