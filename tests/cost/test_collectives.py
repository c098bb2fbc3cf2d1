"""Kinds, payloads and axes of collectives: compiled programs against closed forms, and formats written by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gregale.cost import audit

AXES = ("replica", "data", "model")
SUBSETS = [axes for count in (1, 2, 3) for axes in itertools.combinations(AXES, count)]
ROWS = 64
EVERYONE = "replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"


def every_collective(x):
    """Each kind over each set of axes, each on another number of columns, so that none can be merged."""
    columns = itertools.count(1)

    def fresh(dtype=jnp.float32):
        return x[:, : next(columns)].astype(dtype)

    results = []
    for axes in SUBSETS:
        results.append(jax.lax.psum(fresh(), axes))
        results.append(jax.lax.psum_scatter(fresh(), axes, tiled=True))
        results.append(jax.lax.all_gather(fresh(jnp.uint8), axes, tiled=True))
        results.append(jax.lax.all_to_all(fresh(jnp.int8), axes, 0, 0, tiled=True))
    results += [jax.lax.ppermute(fresh(), axis, [(0, 1), (1, 0)]) for axis in AXES]
    return results


def expected_collectives():
    """(kind, dtype, bytes, bytes sent, axes) by the closed forms: n devices, an operand of b bytes on each."""
    columns = itertools.count(1)
    rows = []
    for axes in SUBSETS:
        n = 2 ** len(axes)
        b = ROWS * 4 * next(columns)
        rows.append(("all-reduce", "f32", b, 2 * (n - 1) / n * b, axes))
        b = ROWS * 4 * next(columns)
        rows.append(("reduce-scatter", "f32", b, (n - 1) / n * b, axes))
        b = ROWS * next(columns)
        rows.append(("all-gather", "u8", n * b, (n - 1) * b, axes))
        b = ROWS * next(columns)
        rows.append(("all-to-all", "s8", b, (n - 1) / n * b, axes))
    for axis in AXES:
        b = ROWS * 4 * next(columns)
        rows.append(("collective-permute", "f32", b, b, (axis,)))
    return rows


def compile_over(mesh):
    mapped = jax.shard_map(every_collective, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((ROWS, 64), jnp.float32)).compile()


def found_rows(found):
    return sorted((c.kind, c.dtype, c.bytes, c.bytes_sent, c.axes) for c in found.collectives)


@pytest.fixture(scope="module")
def compiled(mesh):
    return compile_over(mesh)


def test_every_kind_over_every_set_of_axes(compiled, mesh):
    found = audit(compiled, mesh)
    assert found_rows(found) == sorted(expected_collectives())
    assert all(c.times == 1 and c.loop == () and c.link == "inside slice" for c in found.collectives)


def test_a_mesh_whose_devices_are_in_another_order():
    permuted = np.array(jax.devices())[[5, 0, 3, 6, 1, 7, 2, 4]]
    mesh = Mesh(permuted.reshape(2, 2, 2), AXES)
    assert found_rows(audit(compile_over(mesh), mesh)) == sorted(expected_collectives())


def compile_layers(mesh):
    """The gradient of a scan over six 32 x 32 layers, their weights cut over data and model."""

    def over(*names):
        return NamedSharding(mesh, P(*names))

    def loss(weights, x):
        return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, weights)[0].sum()

    weights = jax.ShapeDtypeStruct((6, 32, 32), jnp.float32, sharding=over(None, "data", "model"))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=over(("replica", "data")))
    gradient = jax.jit(jax.grad(loss), out_shardings=over(None, ("data", "replica"), "model"))
    return gradient.lower(weights, x).compile()


def test_every_form_of_groups_that_the_compiler_prints():
    """Weights are gathered over data once a layer, forward and backward, whichever way the groups are written."""
    printed = ""
    for sizes in [(2, 2, 2), (2, 4, 1)]:
        mesh = Mesh(np.array(jax.devices()).reshape(sizes), AXES)
        text = compile_layers(mesh).as_text()
        printed += text
        gathers = [c for c in audit(text, mesh).collectives if c.kind == "all-gather" and c.axes == ("data",)]
        assert [(c.bytes, c.times) for c in gathers] == [(32 * 32 * 4 // sizes[2], 6)] * 2
    for form in ("replica_groups={{", "replica_groups=[", "replica_groups=mesh[", "], device_ids=(["):
        assert form in printed


def hand(*instructions: str) -> str:
    """A program of these instructions."""
    body = "\n  ".join(instructions)
    return f"HloModule hand, num_partitions=8\n\nENTRY %main (x: f32[4]) -> f32[4] {{\n  {body}\n}}\n"


def test_several_arrays_in_one_operation_are_one_record_for_each_dtype(mesh):
    shapes = ("f32[8,4]{1,0}", "bf16[6]{0}", "f32[3]{0}")
    parameters = [f"%p{index} = {shape} parameter({index})" for index, shape in enumerate(shapes)]
    reduced = f"all-reduce(%p0, %p1, %p2), channel_id=1, {EVERYONE}, to_apply=%sum"
    found = audit(hand(*parameters, f"ROOT %r = ({', '.join(shapes)}) {reduced}"), mesh).collectives
    assert [(c.dtype, c.bytes, c.shapes) for c in found] == [("f32", 140, ((8, 4), (3,))), ("bf16", 12, ((6,),))]


@pytest.mark.parametrize(
    ("line", "axes"),
    [
        ("all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%sum", AXES),
        ("all-reduce(%x), channel_id=1, replica_groups={{0}}, to_apply=%sum", AXES),
        ("all-reduce(%x), replica_groups={{0}}, to_apply=%sum", ()),
        ("all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true", ("model",)),
        ("all-reduce(%x), channel_id=1, replica_groups={{0,7},{1,6},{2,5},{3,4}}, use_global_device_ids=true", None),
        ("all-reduce(%x), channel_id=1, replica_groups={{0,99}}, use_global_device_ids=true", None),
        ("all-reduce(%x), channel_id=1, to_apply=%sum", None),
        ("collective-broadcast(%x), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("model",)),
        ("collective-permute(%x), channel_id=1, source_target_pairs={{0,0},{1,1},{2,4},{4,2}}", ("replica", "data")),
        ("collective-permute(%x), channel_id=1, source_target_pairs={{0,0},{1,1}}", ()),
        ("send(%x, %token), channel_id=1", None),
    ],
)
def test_groups_of_every_form_are_listed(line, axes, mesh):
    root = f'ROOT %r = f32[4]{{0}} {line}, metadata={{op_name="jit(f)/psum"}}'
    text = hand("%x = f32[4]{0} parameter(0)", "%token = token[] after-all()", root)
    (found,) = audit(text, mesh).collectives
    assert found.axes == (("unknown",) if axes is None else axes)
    assert found.bytes == 16
    assert set(found.touched) == set(AXES if axes is None else axes)
    assert found.bytes_sent == (0 if axes == () else found.bytes_sent)


def test_a_ragged_exchange_counts_what_goes_in_and_a_transfer_to_the_host_nothing(mesh):
    text = hand(
        "%x = f32[10,2]{1,0} parameter(0)",
        "%o = f32[30,2]{1,0} parameter(1)",
        "%n = s32[8]{0} parameter(2)",
        "%send = (f32[10,2]{1,0}, u32[], token[]) send(%x, %token), channel_id=2, is_host_transfer=true",
        f"ROOT %r = f32[30,2]{{1,0}} ragged-all-to-all(%x, %o, %n, %n, %n, /*index=5*/%n), channel_id=1, {EVERYONE}",
    )
    assert [(c.kind, c.dtype, c.bytes) for c in audit(text, mesh).collectives] == [("ragged-all-to-all", "f32", 80)]


def test_what_a_gpu_program_looks_like(stored, mesh, summary):
    """A sample written by hand in XLA:GPU's format: pairs of start and done, wrappers, iota and mesh groups."""
    found = audit(stored("gpu"), mesh).collectives
    gather = 2 * 16 * 8 * 2
    assert summary(found) == [
        ("all-gather", "bf16", gather, ("model",), 4, 1),
        ("all-reduce", "f32", 64 * 4 * 4, ("data",), 4, 1),
        ("all-to-all", "u8", 2 * 64, ("replica",), 1, 0),
        ("collective-permute", "bf16", 16 * 8 * 2, ("replica",), 4, 1),
        ("collective-permute", "f32", 32 * 4 * 4, ("model",), 1, 0),
        ("reduce-scatter", "f32", 64 * 4 * 4, ("replica",), 1, 0),
    ]
    assert all(c.is_async for c in found)
    assert sum(c.bytes_sent for c in found if c.kind == "all-gather") == gather / 2


def test_a_real_gpu_program_whose_loops_are_pipelined(stored, boxes, summary):
    """Gradients of four layers on two boxes of two, gathered a turn ahead: the first before its loop."""
    found = audit(stored("gpu_layers"), boxes((2, 2), ("replica", "data"))).collectives
    size = 256 * 256 * 2
    assert summary(found) == [
        ("all-gather", "bf16", size, ("data",), 1, 0),
        ("all-gather", "bf16", size, ("data",), 3, 1),
        ("all-reduce", "bf16", size, ("replica", "data"), 4, 1),
    ]
    assert [c.link for c in found] == ["inside slice", "inside slice", "between slices"]
    assert all(c.is_async for c in found)


def test_what_xla_gpu_waits_for_is_not_asynchronous(stored, mesh):
    """It writes a start and an end of every collective, and beside whether it is waited for at once."""
    waiting = stored("gpu").replace('"is_sync":false', '"is_sync":true')
    assert [c.kind for c in audit(waiting, mesh).collectives if not c.is_async] == ["all-gather"]
