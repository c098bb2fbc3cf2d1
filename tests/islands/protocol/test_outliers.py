"""Which messages of a round contribute nothing."""

from gregale.islands.protocol.outliers import NOT_FINITE, Size, left_out, median


def out(*norms: float | None, usual: float | None = None, weights: tuple[float, ...] = ()) -> set[int]:
    """The indices of the messages that are left out, at ten times what is expected."""
    weights = weights or (1.0,) * len(norms)
    sizes = {
        str(index): None if norm is None else Size(norm, weight)
        for index, (norm, weight) in enumerate(zip(norms, weights, strict=True))
    }
    return {int(name) for name in left_out(sizes, Size(usual, 1.0) if usual else None, 10.0)}


def test_messages_far_above_the_median_are_left_out():
    assert out(1.0, 1.5, 30.0) == {2}
    assert out(1.0, 1.5, 9.0) == set()
    assert out(1.0, 1.5, 100.0, 100.0) == {2, 3}, "half of the messages cannot lift it"


def test_of_two_messages_the_one_unlike_the_previous_rounds_is_left_out():
    assert out(1.0, 100.0, usual=1.0) == {1}
    assert out(0.01, 1.0, usual=1.0) == set()  # the first one has just come, and has moved less
    assert out(1.0, 100.0) == {1}  # in the first round


def test_a_single_message_is_left_out_only_if_it_is_not_finite():
    assert out(1000.0, usual=1.0) == set()
    assert out(None) == {0}
    assert left_out({"a": None, "b": Size(1.0, 1.0)}, None, 10.0) == {"a": NOT_FINITE}


def test_a_message_of_more_tokens_may_have_a_larger_norm():
    assert out(1.0, 1.0, 30.0, weights=(1.0, 1.0, 30.0)) == set()
    assert out(1.0, 30.0, usual=1.0, weights=(1.0, 30.0)) == set()
    assert out(1.0, 1.0, 301.0, weights=(1.0, 1.0, 30.0)) == {2}


def test_a_norm_of_zero_is_not_compared_with():
    assert out(0.0, 0.0, 1.0) == set()
    assert median([Size(0.0, 1.0), Size(2.0, 1.0), Size(3.0, 1.0)]) == Size(2.0, 1.0)
    assert median([Size(0.0, 1.0)]) is None
