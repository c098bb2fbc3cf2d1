"""The pipeline's loop state, against what JAX finds as its transpose, and with items that can be told apart."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gregale.communication.pipeline import (
    Loop,
    Schedule,
    advanced,
    advanced_transpose,
    finished,
    stage_inputs,
    stage_inputs_transpose,
    started,
    unfinished,
)

TABLE = [(3, 6, 2, 2), (3, 9, 3, 1), (4, 8, 1, 2)]  # with waiting outputs, or held ones, or neither


@pytest.mark.parametrize("numbers", TABLE)
def test_every_stage_gets_its_item_and_outputs_lie_where_inputs_lay(numbers):
    """Each stage adds 1 to microbatch m, which starts as 1000 m: it has then been through so many stages."""
    schedule = Schedule(*numbers)
    S = schedule.stages
    loop = started(1000 * jnp.arange(schedule.microbatches).reshape(S, -1), schedule)
    for t in range(schedule.iterations):
        inputs = np.asarray(stage_inputs(loop, jnp.int32(t), schedule))
        for s in range(S):
            if (item := schedule.item(s, t)) is not None:
                assert inputs[s] == 1000 * item.microbatch + item.repeat * S + s
        loop = advanced(loop, jnp.asarray(inputs + 1), jnp.int32(t), schedule)
    passed = S * schedule.repeats
    np.testing.assert_array_equal(finished(loop, schedule).ravel(), 1000 * np.arange(schedule.microbatches) + passed)


@pytest.mark.parametrize("numbers", TABLE)
def test_transposes_are_those_that_jax_finds(numbers):
    schedule = Schedule(*numbers)
    generator = np.random.default_rng(0)

    def random(like):
        return jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape), x.dtype), like)

    start = started(jnp.zeros((schedule.stages, schedule.columns, 2)), schedule)
    outputs = start.shift
    assert_equal(unfinished(start.io, schedule), start)
    for t in map(jnp.int32, (0, 1, schedule.microbatches - 1, schedule.iterations - 1)):
        after, inputs = random(start), random(outputs)
        one_step = partial(advanced, t=t, schedule=schedule)
        exact = jax.linear_transpose(one_step, start, outputs)(after)
        assert_equal(advanced_transpose(after, t, schedule), exact)
        read = partial(stage_inputs, t=t, schedule=schedule)
        exact = jax.tree.map(jnp.add, jax.linear_transpose(read, start)(inputs)[0], after)
        assert_equal(stage_inputs_transpose(after, inputs, t, schedule), exact)
    last = random(start.io)
    exact = jax.linear_transpose(lambda loop: finished(loop, schedule), start)(last)[0]
    assert_equal(unfinished(last, schedule), exact)


def assert_equal(found: Loop | tuple, exact: Loop | tuple) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(exact)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_array_equal(left, right)
