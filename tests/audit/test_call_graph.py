"""Collectives are found wherever the program runs them, and as often."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from gregale.audit import audit
from gregale.audit.call_graph import walk
from gregale.audit.hlo import parse

ALL = "replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"
TEXT = f"""HloModule hand, num_partitions=8

%helper (h: f32[4]) -> f32[4] {{
  %h = f32[4] parameter(0)
  ROOT %in_call = f32[4] all-reduce(%h), channel_id=1, {ALL}, to_apply=%sum
}}

%wrapped (w: f32[4]) -> f32[32] {{
  %w = f32[4] parameter(0)
  ROOT %in_async = f32[32] all-gather(%w), channel_id=2, {ALL}, dimensions={{0}}
}}

%then (t: f32[4]) -> f32[4] {{
  %t = f32[4] parameter(0)
  ROOT %in_branch = f32[4] all-reduce(%t), channel_id=3, {ALL}, to_apply=%sum
}}

%else (e: f32[4]) -> f32[4] {{
  ROOT %e = f32[4] parameter(0)
}}

%never (n: f32[4]) -> f32[4] {{
  %n = f32[4] parameter(0)
  ROOT %in_dead_code = f32[4] all-reduce(%n), channel_id=4, {ALL}, to_apply=%sum
}}

ENTRY %main (x: f32[4], p: pred[]) -> f32[4] {{
  %x = f32[4] parameter(0)
  %p = pred[] parameter(1)
  %one = f32[4] call(%x), to_apply=%helper
  %two = f32[4] call(%one), to_apply=%helper
  %start = ((f32[4]), f32[32], u32[]) async-start(%two), calls=%wrapped
  %done = f32[32] async-done(%start), calls=%wrapped
  %old = f32[4] conditional(%p, %two, %two), true_computation=%then, false_computation=%else
  ROOT %new = f32[4] conditional(%p, %old, %old), branch_computations={{%else, %then}}
}}
"""


def test_calls_async_wrappers_and_branches_are_followed(mesh):
    found = audit(TEXT, mesh).collectives
    assert [(c.name, c.is_async, c.conditional) for c in found] == [
        ("in_call", False, False),
        ("in_call", False, False),
        ("in_async", True, False),
        ("in_branch", False, True),
        ("in_branch", False, True),
    ]
    names = [site.instruction.name for site in walk(parse(TEXT), {})]
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
