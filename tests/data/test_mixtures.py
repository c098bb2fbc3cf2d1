"""A mixture for each replica: rows from the sources that it names, never one window in two replicas."""

from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gregale.data.config import DataConfig
from gregale.data.mixtures import cuts, replica_examples
from gregale.data.sources import TextSource
from gregale.errors import UserError
from gregale.programs.runtime.batches import batches
from tests.data.conftest import numbered

BATCH = 12
FIRSTS = {"a": 0, "b": 100, "c": 1000}
COUNTS = {"a": 60, "b": 30, "c": 12}


@pytest.fixture
def sources():
    return {name: numbered(COUNTS[name], FIRSTS[name]) for name in FIRSTS}


def source_of(token: int) -> str:
    return max((name for name in FIRSTS if FIRSTS[name] <= token), key=FIRSTS.__getitem__)


def drawn(sources, mixtures, steps: int, seed: int | None = 0, start: int = 0) -> np.ndarray:
    """[step, replica, row] the first token of every row."""
    with closing(batches(replica_examples(sources, mixtures, seed), BATCH, first=start * BATCH)) as made:
        tokens = np.stack([next(made)["tokens"][:, 0] for _ in range(steps)])
    return tokens.reshape(steps, len(mixtures), -1)


MIXTURES = [{"a": 1.0}, {"a": 1.0, "b": 3.0}, {"b": 0.5, "c": 0.5, "a": 0.0}]


def test_each_replica_draws_from_its_own_sources_by_its_weights(sources):
    found = drawn(sources, MIXTURES, steps=16)
    for replica, mixture in enumerate(MIXTURES):
        names = [source_of(token) for token in found[:, replica].ravel()]
        for name in FIRSTS:
            expected = mixture.get(name, 0.0) / sum(mixture.values()) * len(names)
            assert abs(names.count(name) - expected) <= 1, (replica, name)


@pytest.mark.parametrize("seed", [0, None], ids=["shuffled", "in order"])
def test_no_window_is_seen_by_two_replicas_and_none_is_left_out(sources, seed):
    found = drawn(sources, MIXTURES, steps=26, seed=seed)
    seen = [set(found[:, replica].ravel().tolist()) for replica in range(len(MIXTURES))]
    assert sum(map(len, seen)) == sum(COUNTS.values())
    assert set().union(*seen) == {FIRSTS[name] + window for name in FIRSTS for window in range(COUNTS[name])}
    # 1 and 1/4 of every row are drawn from a: 4 to 1. 3/4 and 1/2 from b: 3 to 2.
    assert [sum(token < 100 for token in own) for own in seen] == [48, 12, 0]
    assert [sum(100 <= token < 1000 for token in own) for own in seen] == [0, 18, 12]


def test_a_batch_depends_on_seed_and_step_alone(sources):
    whole = drawn(sources, MIXTURES, steps=9)
    np.testing.assert_array_equal(drawn(sources, MIXTURES, steps=3, start=6), whole[6:])
    assert (drawn(sources, MIXTURES, steps=1, seed=1) != whole[:1]).any()
    with closing(batches(replica_examples(sources, MIXTURES, 0), 2 * BATCH, first=2 * BATCH)) as made:
        larger = next(made)["tokens"][:, 0].reshape(len(MIXTURES), -1)
    np.testing.assert_array_equal(larger, np.concatenate(list(whole[2:4]), axis=1))
    examples = replica_examples(sources, MIXTURES, 0)
    shares = [examples.batch(7 * BATCH, BATCH, rows)["tokens"] for rows in ([5, 6, 11], [0, 1, 2, 3, 4, 7, 8, 9, 10])]
    order = np.argsort([5, 6, 11, 0, 1, 2, 3, 4, 7, 8, 9, 10])
    np.testing.assert_array_equal(np.concatenate(shares)[order][:, 0].reshape(len(MIXTURES), -1), whole[7])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(500, 5000))
def test_cuts_cover_a_source_in_proportion(weights, windows):
    mixtures = [{"a": float(weight), "rest": 10.0 - weight} for weight in weights]
    bounds = cuts("a", windows, mixtures)
    assert (bounds[0], bounds[-1]) == (0, windows)
    np.testing.assert_allclose(np.diff(bounds), np.array(weights) / sum(weights) * windows, atol=1)
    assert ((np.diff(bounds) > 0) == (np.array(weights) > 0)).all()


def test_a_source_too_small_for_its_replicas_is_refused(sources):
    mixtures = [{"c": 1.0}, {"c": 0.01, "a": 0.99}]
    with pytest.raises(UserError, match=r"the source c has 12 rows to train on, and 2 replicas share them"):
        replica_examples(sources, mixtures, 0)


def test_mistakes_are_named():
    for mixtures, message in (
        ([{"a": 1.0}, {"d": 1.0}], r"data\.replica_mixtures\.1: there is no source 'd'; data\.sources has: a, b, c\."),
        ([{"a": 0.0}], r"data\.replica_mixtures\.0: no source has a weight above 0"),
        ([{}], r"data\.replica_mixtures\.0: no source has a weight above 0"),
        ([{"a": -1.0}], r"replica_mixtures\.0\.a is -1; it has to be "),
        ([{"a": float("nan")}], r"replica_mixtures\.0\.a is nan; it has to be "),
        ([{"a": float("inf")}], r"replica_mixtures\.0\.a is inf; it has to be "),
    ):
        with pytest.raises(UserError, match=message):
            DataConfig(sources=dict.fromkeys(FIRSTS, TextSource(files=("x",))), replica_mixtures=mixtures)
