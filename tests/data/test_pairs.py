"""Pairs of answers: their forms, and that the two rows of one stay together through splits, shuffles and mixtures."""

import json

import numpy as np
import pytest

from gregale.data.config import DataConfig
from gregale.data.preparation import prepare
from gregale.data.sources import ChatSource
from gregale.data.tokenizers import BytesTokenizer
from gregale.errors import UserError

L, COUNT = 40, 40
END = bytes([0])  # stands for the end of a turn
USER, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "y"), ("assistant", "n"))
)
SYSTEM = {"role": "system", "content": "s"}


def source(path, rows, **options) -> ChatSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ChatSource(files=(str(path),), form="pairs", packing="pad", **options)


def pairs_of(letter: str, count: int = COUNT) -> list[dict]:
    return [
        {"prompt": f"{letter}{n}", "chosen": f"yes {letter}{n}", "rejected": f"no {letter}{n}"} for n in range(count)
    ]


def answer(row: dict[str, np.ndarray]) -> bytes:
    """The targets that the loss is on, as bytes."""
    ids = row["targets"][row["loss_mask"] > 0]
    return bytes(np.where(ids == BytesTokenizer.end_of_document, 0, ids).tolist())


def names_of(rows: dict[str, np.ndarray]) -> list[str]:
    """The name of each pair of a batch, whose rows have to be the two answers, in order, to one prompt."""
    found = []
    for number in range(0, len(rows["tokens"]), 2):
        chosen, rejected = ({key: array[number + side] for key, array in rows.items()} for side in (0, 1))
        name = answer(chosen).removeprefix(b"yes ").removesuffix(END)
        assert (answer(chosen), answer(rejected)) == (b"yes " + name + END, b"no " + name + END)
        assert all(bytes(row["tokens"][: 5 + len(name)].tolist()) == b"user\n" + name for row in (chosen, rejected))
        found.append(name.decode())
    return found


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "q", "chosen": "y", "rejected": "n"}, [USER]),
        ({"prompt": "q", "chosen": [YES], "rejected": [NO], "system": "s"}, [SYSTEM, USER]),
        ({"prompt": [SYSTEM, USER], "chosen": [YES], "rejected": [NO]}, [SYSTEM, USER]),
        ({"prompt": "q", "chosen": [USER, YES], "rejected": [USER, NO]}, [USER]),
        ({"chosen": [USER, NO, USER, YES], "rejected": [USER, NO, USER, NO]}, [USER, NO, USER]),
    ],
)
def test_rows_are_two_conversations_with_one_prompt(tmp_path, row, prompt):
    (document,) = source(tmp_path / "a", [row]).documents()
    found = [json.loads(each.text)["messages"] for each in (document.content.chosen, document.content.rejected)]
    assert found == [[*prompt, YES], [*prompt, NO]]


def test_rows_without_a_pair_are_refused(tmp_path):
    other = {"chosen": [USER, YES], "rejected": [{**USER, "content": "other"}, NO]}
    with pytest.raises(UserError, match="line 1: `chosen` and `rejected` differ before the user's last message ends"):
        list(source(tmp_path / "a", [other]).documents())
    silent = source(
        tmp_path / "b", [*pairs_of("a"), {"chosen": [USER, YES], "rejected": [USER]}], on_bad_document="skip"
    )
    corpus = prepare(DataConfig({"x": silent}, workers=1, cache=f"{tmp_path}/cache"), L, 0)
    assert f"{tmp_path}/b, line 41: `rejected` has no token that the loss is on." in "".join(corpus.notes)
    assert len(corpus.train_streams["x"].numbers) + len(corpus.held_out_streams["x"].numbers) == 2 * COUNT


@pytest.mark.parametrize("mixtures", [[], [{"a": 1.0}, {"a": 1.0, "b": 3.0}]])
def test_pairs_stay_together(tmp_path, mixtures):
    sources = {
        letter: source(tmp_path / letter, pairs_of(letter), weight=weight) for letter, weight in (("a", 1), ("b", 2))
    }
    config = DataConfig(sources, workers=1, held_out=0.2, cache=f"{tmp_path}/cache", replica_mixtures=mixtures)
    corpus = prepare(config, L, 0)
    size, held_out = 8, names_of(corpus.held_out.rows(range(len(corpus.held_out))))
    names = [name for step in range(60) for name in names_of(corpus.train.batch(step * size, size, range(size)))]
    assert 4 < len(held_out) == len(set(held_out)) < 30
    assert {*names, *held_out} == {f"{letter}{n}" for letter in "ab" for n in range(COUNT)}
    assert not {*names} & {*held_out}
    assert names[:20] != sorted(names[:20]), "they are shuffled"
    whole = corpus.train.batch(24, size, range(size))
    part = corpus.train.batch(24, size, [2, 3, 7])
    assert all((part[key] == array[[2, 3, 7]]).all() for key, array in whole.items())


def test_a_few_pairs_hold_out_the_last(tmp_path):
    config = DataConfig({"a": source(tmp_path / "a", pairs_of("a", 3))}, workers=1, cache=f"{tmp_path}/cache")
    corpus = prepare(config, L, 0)
    assert names_of(corpus.held_out.rows(range(len(corpus.held_out)))) == ["a2"]
    assert {*names_of(corpus.train.rows(range(8)))} == {"a0", "a1"}
