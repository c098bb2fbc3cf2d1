"""The metrics that scores make."""

import math

import numpy as np
import pytest

from gregale.evaluation.tasks import Form, Pair, Question, Score, Task


def metrics(kind: str, *scored: tuple[list[float], int, list[int]], greedy: tuple[bool, ...] = ()) -> dict[str, float]:
    questions = tuple(Question((Pair("", ""),) * len(each), answer, "", tuple(sizes)) for each, answer, sizes in scored)
    greedy = greedy or (False,) * len(scored)
    scores = [Score(np.array(each), np.array([match])) for (each, *_), match in zip(scored, greedy, strict=True)]
    return Task("name", kind, questions, "", Form()).metrics(scores)


def test_the_largest_sum_and_the_largest_for_each_character():
    found = metrics("multiple_choice", ([-3.0, -4.0], 1, [1, 4]), ([-1.0, -2.0], 0, [1, 1]), ([-2.0, -1.0], 0, [1, 1]))
    assert found["acc"] == pytest.approx(1 / 3)
    assert found["acc_norm"] == pytest.approx(2 / 3)
    # sqrt(p (1 - p) / (n - 1)), which the formula is for zeros and ones
    assert found["acc_stderr"] == pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 2))
    assert list(found) == ["acc", "acc_stderr", "acc_norm", "acc_norm_stderr"]


def test_of_equal_choices_the_first_counts_and_an_empty_one_is_the_least_likely_for_each_character():
    assert metrics("multiple_choice", ([-1.0, -1.0], 0, [1, 1]))["acc"] == 1
    assert metrics("multiple_choice", ([-1.0, -1.0], 1, [1, 1]))["acc"] == 0
    found = metrics("multiple_choice", ([-0.1, -5.0], 1, [0, 3]))
    assert (found["acc"], found["acc_norm"]) == (0, 1)
    assert math.isnan(metrics("cloze", ([-1.0, -2.0], 0, []))["acc_stderr"]), "one question has none"


def test_greedy_matches_and_perplexity():
    losses = [1.0, 2.0, 6.0]
    found = metrics("greedy_match", *(([-loss], 0, []) for loss in losses), greedy=(True, False, False))
    assert found["acc"] == pytest.approx(1 / 3)
    assert found["perplexity"] == pytest.approx(math.exp(3))
    assert found["perplexity_stderr"] == pytest.approx(math.exp(3) * np.std(losses, ddof=1) / math.sqrt(3))


def test_a_model_that_is_not_finite_has_no_figures():
    assert all(map(math.isnan, metrics("multiple_choice", ([math.nan, -1.0], 0, [1, 1])).values()))
