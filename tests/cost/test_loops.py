"""Collectives are found wherever a program runs them, as often as it does: as printed, worked out or given."""

import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from gregale.cost import audit
from gregale.cost.hlo import _iterations, parse, walk


@pytest.fixture(scope="module")
def loops_text(mesh):
    """Loops of many kinds, each around one psum of its own size."""

    def body(x):
        def around(size):
            return lambda _, carry: carry + jax.lax.psum(x[:size] * carry, "data").sum()

        total = jax.lax.fori_loop(0, 7, around(1), x.sum())
        total = jax.lax.fori_loop(3, 11, around(2), total)
        total, _ = jax.lax.scan(lambda c, i: (around(3)(i, c), None), total, jnp.arange(5), reverse=True)

        def outer(carry, _):
            inner, _ = jax.lax.scan(lambda c, i: (around(4)(i, c) * 2, None), carry, None, length=3)
            return inner * jax.lax.psum(x[:5] * carry, "model").sum(), None

        total, _ = jax.lax.scan(outer, total, None, length=6)
        _, total = jax.lax.while_loop(lambda s: s[0] > 2, lambda s: (s[0] - 3, around(6)(0, s[1])), (20, total))
        bound = jax.lax.psum(total, ("replica", "data", "model")).astype(jnp.int32)
        with jax.named_scope("settle"):
            return jax.lax.fori_loop(0, bound, around(7), total)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((64,), jnp.float32)).compile().as_text()


def times_by_size(found):
    return {c.shapes[0][0]: c.times for c in found.collectives if c.shapes[0]}


# Size of the psum: how often its loop runs. Counting down from 20 by 3 while above 2: 20, 17, ..., 5.
EXPECTED = {1: 7, 2: 8, 3: 5, 4: 18, 5: 6, 6: 6, 7: None}


def test_counts_are_printed_or_worked_out_or_given(loops_text, mesh):
    """XLA:TPU prints none."""
    assert times_by_size(audit(loops_text, mesh)) == EXPECTED
    bare, removed = re.subn(r',?"known_trip_count":\{"n":"\d+"\}', "", loops_text)
    assert removed >= 6
    assert times_by_size(audit(bare, mesh)) == EXPECTED
    name = next(c.loop[-1] for c in audit(loops_text, mesh).collectives if c.times is None)
    for key in ("settle", name, "while"):
        assert times_by_size(audit(loops_text, mesh, {key: 9})) == EXPECTED | {7: 9}, "known ones stay"


def test_nested_loops_are_listed_outermost_first(loops_text, mesh):
    found = {c.shapes[0][0]: c for c in audit(loops_text, mesh).collectives if c.shapes[0]}
    assert found[4].loop[0] == found[5].loop[0]
    assert [loop.times for loop in found[4].loops] == [6, 3]
    assert len(found[5].loop) == 1
    assert found[7].loops[0].scope.endswith("settle/while")


def test_a_bound_that_an_outer_loop_carries_is_known_if_it_is_unchanged(mesh, stored):
    """0, 2, ..., 10 in the inner loop, three times; the bound is an element of the tuple of the loop around it."""
    for change, times in (("%n", 18), ("%changed", None)):
        assert audit(stored("carried_bound").replace("CHANGE", change), mesh).collectives[0].times == times


@given(
    direction=st.sampled_from(["LT", "LE", "GT", "GE", "NE"]),
    start=st.integers(-20, 20),
    step=st.integers(-4, 4),
    limit=st.integers(-20, 20),
)
def test_turns_are_those_of_the_loop_itself(direction, start, step, limit):
    goes_on = {
        "LT": lambda i: i < limit,
        "LE": lambda i: i <= limit,
        "GT": lambda i: i > limit,
        "GE": lambda i: i >= limit,
        "NE": lambda i: i != limit,
    }[direction]
    counter, turns = start, 0
    while goes_on(counter) and turns <= 100:
        counter, turns = counter + step, turns + 1
    found = _iterations(direction, start, step, limit)
    if turns > 100:
        assert found is None
    elif turns > 0:
        assert found == turns
    else:
        assert not found


def test_calls_async_wrappers_and_branches_are_followed(mesh, stored):
    found = audit(stored("calls"), mesh).collectives
    assert [(c.name, c.is_async, c.conditional) for c in found] == [
        ("in_call", False, False),
        ("in_call", False, False),
        ("in_async", True, False),
        ("in_branch", False, True),
        ("in_branch", False, True),
    ]
    names = [site.instruction.name for site in walk(parse(stored("calls")), {})]
    assert names[:5] == ["x", "p", "one", "h", "in_call"]
    assert "in_dead_code" not in names


def test_a_collective_in_the_condition_of_a_loop_runs_once_more_than_the_body(mesh):
    def body(x):
        def goes_on(state):
            return (state[0] < 5) & (jax.lax.psum(state[1], "model").sum() < 1e9)

        return jax.lax.while_loop(goes_on, lambda s: (s[0] + 1, s[1] * jax.lax.psum(s[1][:3], "data").sum()), (0, x))[1]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()
    found = audit(compiled, mesh, {"while": 5}).collectives
    assert {c.axes: c.times for c in found} == {("model",): 6, ("data",): 5}
