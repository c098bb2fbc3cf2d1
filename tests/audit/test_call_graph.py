"""Collectives are found wherever the program runs them, and as often."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from gregale.audit import audit
from gregale.audit.call_graph import walk
from gregale.audit.hlo import parse


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
