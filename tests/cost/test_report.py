"""Sums over the collectives, the JSON and the table."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from gregale.cost import audit
from gregale.errors import UserError


@pytest.fixture(scope="module")
def compiled(mesh):
    """Three times a sum over data of 4 x 8 f32, then one over replica and model of 8 f32."""

    def body(x):
        with jax.named_scope("turns"):
            x, _ = jax.lax.scan(lambda c, _: (c * jax.lax.psum(c, "data"), None), x, None, length=3)
        return jax.lax.psum(x.sum(0), ("replica", "model"))

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((4, 8), jnp.float32)).compile()


def test_sums_and_selections_of_a_program_or_its_text(compiled, mesh):
    found = audit(compiled, mesh)
    assert audit(compiled.as_text(), mesh) == found
    assert found.bytes_per_step("data") == 3 * 128
    assert found.bytes_per_step("replica") == found.bytes_per_step("model") == 32
    assert found.bytes_per_step() == 3 * 128 + 32
    (inside,) = [each for each in found.collectives if each.loops]
    assert (inside.axes, [loop.times for loop in inside.loops]) == (("data",), [3])
    assert [c.axes for c in found.over("model")] == [("replica", "model")]
    assert found.over("nowhere") == found.unknown() == ()


def test_json_has_the_agreed_keys_and_the_table_a_line_for_each(compiled, mesh):
    report = json.loads(json.dumps(audit(compiled, mesh).to_dict()))
    assert report["bytes_per_step"] == {"axes": {"data": 384, "replica,model": 32}, "link": {"inside slice": 416}}
    first = report["collectives"][0]
    assert first.pop("loop")[0].startswith("while")
    expected = {
        "kind": "all-reduce",
        "dtype": "f32",
        "bytes": 128,
        "axes": ["data"],
        "times": 3,
        "link": "inside slice",
    }
    assert first == expected
    lines = audit(compiled, mesh).table().splitlines()
    assert lines[0].split() == ["kind", "dtype", "bytes", "axes", "loop", "times", "link", "name"]
    assert len(lines) == 3
    assert lines[1].split()[:4] == ["all-reduce", "f32", "128", "data"]


def test_an_unknown_number_of_turns_is_told_and_never_counted_as_one(mesh, stored):
    text = stored("unknown_times")
    found = audit(text, mesh)
    assert found.to_dict()["bytes_per_step"] == {"axes": {"unknown": None}, "link": {"inside slice": None}}
    with pytest.raises(UserError, match=r"'r': loop\.1 \(jit\(f\)/outer/while\); give its count in loop_trips"):
        found.bytes_per_step()
    assert audit(text, mesh, {"outer": 5}).bytes_per_step("data") == 5 * 16
    assert len(found.unknown()) == 1, "its groups, which are over every axis that they touch"
    assert all(found.over(axis) == found.collectives for axis in ("replica", "data", "model"))


def test_text_that_is_no_program_and_a_mesh_of_another_size_are_refused(compiled, mesh):
    with pytest.raises(UserError, match="found 'module @jit_f', which has no ENTRY"):
        audit("module @jit_f", mesh)
    half = jax.sharding.Mesh(mesh.devices[:1], mesh.axis_names)
    with pytest.raises(UserError, match=r"compiled for 8 devices .* has 4 in 1 slice\(s\)"):
        audit(compiled, half)
