"""Programs of the real TPU compiler, for two slices, on a machine without a TPU.

`python tests/cost/test_tpu.py` writes the stored texts again, which the tests also read.
"""

import os
import re
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gregale.cost import audit

pytestmark = pytest.mark.usefixtures("compiled_anew")  # JAX cannot read what it kept of a program for a topology

AXES = ("replica", "data", "model")
FLOATS = 64 * 128  # on each device, in the mapped programs
INSIDE, BETWEEN = "inside slice", "between slices"


def slices(sizes=(2, 2, 2), topology="v5e:2x2", count=2):
    described = topologies.get_topology_desc(topology, platform="tpu", num_slices=count)
    devices = sorted(described.devices, key=lambda device: (getattr(device, "slice_index", 0), device.id))
    return Mesh(np.array(devices).reshape(sizes), AXES)


def compile_mapped(body, mesh):
    x = jax.ShapeDtypeStruct((64 * mesh.size, 128), jnp.float32, sharding=NamedSharding(mesh, P(AXES)))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(AXES), out_specs=P(), check_vma=False)).lower(x).compile()


def across_slices(x):
    """One of each kind over replica."""
    y = jnp.sin(jax.lax.psum_scatter(x, "replica", tiled=True))
    y = jnp.cos(jax.lax.all_gather(y, "replica", tiled=True))
    y = jax.lax.all_to_all(y, "replica", 0, 0, tiled=True)
    y = jnp.sin(jax.lax.psum(y, "replica"))
    return jax.lax.ppermute(y.astype(jnp.bfloat16), "replica", [(0, 1)]).sum()


def in_loops(x):
    """Sums over model in a loop in a loop, over replica in the outer, a permutation in another, one unknown loop."""

    def inner(carry, _):
        return carry * jax.lax.psum(carry, "model") + 1, None

    def outer(carry, _):
        carry, _ = jax.lax.scan(inner, carry, None, length=3)
        return carry + jax.lax.psum(carry, "replica"), None

    y, _ = jax.lax.scan(outer, x, None, length=5)
    y = jax.lax.fori_loop(0, 7, lambda i, carry: carry + jax.lax.ppermute(carry, "data", [(0, 1), (1, 0)]), y)
    bound = jax.lax.psum(x.sum(), "data").astype(jnp.int32)
    with jax.named_scope("settle"):
        return jax.lax.fori_loop(0, bound, lambda i, carry: jnp.sin(jax.lax.psum(carry, "data")), y).sum()


def kernel_in_a_loop(x):
    """Attention by a Pallas kernel in a loop, between sums over model and over data; after it a sum over replica."""
    heads, positions, width = 2, 256, 64 * 128 // (2 * 256)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((positions, positions))] * heads)
    kernel = splash_attention_kernel.make_splash_mha_single_device(mask)

    def turn(carry, _):
        q = jax.lax.psum(carry, "model").reshape(heads, positions, width)
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 128 - width)))
        return carry + jax.lax.psum(kernel(q, q, q)[..., :width].reshape(carry.shape), "data"), None

    return jax.lax.psum(jax.lax.scan(turn, x, None, length=3)[0], "replica").sum()


def compile_layers(mesh):
    """The gradient of six layers with weights gathered over data, which the compiler overlaps and peels."""

    def over(*names):
        return NamedSharding(mesh, P(*names))

    def loss(weights, x):
        return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, weights)[0].sum()

    weights = jax.ShapeDtypeStruct((6, 1024, 1024), jnp.bfloat16, sharding=over(None, "data", "model"))
    x = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16, sharding=over(("replica", "data")))
    gradient = jax.jit(jax.grad(loss), out_shardings=over(None, ("data", "replica"), "model"))
    return gradient.lower(weights, x).compile()


PROGRAMS = {
    "tpu_across": lambda mesh: compile_mapped(across_slices, mesh),
    "tpu_loops": lambda mesh: compile_mapped(in_loops, mesh),
    "tpu_layers": compile_layers,
    "tpu_kernel": lambda mesh: compile_mapped(kernel_in_a_loop, mesh),
}


@pytest.fixture(scope="module", params=["compiled now", "stored"])
def program(request, stored, pod):
    """The text of a program by its name, and its mesh: from the compiler, and as it was stored."""
    if request.param == "stored":
        return lambda name: (stored(name), pod((2, 2, 2), slices=2))
    mesh = slices()
    compiled = {name: build(mesh) for name, build in PROGRAMS.items()}
    return lambda name: (compiled[name].as_text(), mesh)


def test_transfers_between_slices(program):
    b = FLOATS * 4
    found = audit(*program("tpu_across")).collectives
    assert [(c.kind, c.dtype, c.bytes, c.bytes_sent, c.axes, c.link, c.is_async) for c in found] == [
        ("reduce-scatter", "f32", b, b / 2, ("replica",), BETWEEN, True),
        ("all-gather", "f32", b, b / 2, ("replica",), BETWEEN, True),
        ("all-to-all", "f32", b, b / 2, ("replica",), BETWEEN, True),
        ("all-reduce", "f32", b, b, ("replica",), BETWEEN, True),
        ("collective-permute", "bf16", b // 2, b // 2, ("replica",), BETWEEN, True),
    ]


def test_loops_without_a_printed_count(program):
    text, mesh = program("tpu_loops")
    assert "known_trip_count" not in text
    found = audit(text, mesh, {"settle": 4}).collectives
    turns = {(c.kind, c.axes): (len(c.loop), c.times, c.link) for c in found if c.bytes == FLOATS * 4}
    assert turns[("all-reduce", ("model",))] == (2, 15, INSIDE)
    assert turns[("all-reduce", ("replica",))] == (1, 5, BETWEEN)
    assert turns[("collective-permute", ("data",))] == (1, 7, INSIDE)
    assert turns[("all-reduce", ("data",))] == (1, 4, INSIDE)


def test_a_kernel_in_a_loop_hides_no_collective_and_no_count(program):
    text, mesh = program("tpu_kernel")
    assert "\n}}" in text, "the kernel's metadata goes on over further lines"
    found = audit(text, mesh).collectives
    assert {(c.kind, c.axes, c.times, c.link) for c in found if c.bytes == FLOATS * 4} == {
        ("all-reduce", ("model",), 3, INSIDE),
        ("all-reduce", ("data",), 3, INSIDE),
        ("all-reduce", ("replica",), 1, BETWEEN),
    }


def test_overlapped_and_fused_collectives_are_counted_once(program):
    """Six layers, 1024 x 1024 in bf16, two devices along each axis, whatever the compiler peels or overlaps."""
    found = audit(*program("tpu_layers"))
    assert not found.unknown()
    totals = Counter()
    for c in found.collectives:
        totals[c.kind, c.axes, c.bytes] += c.times or 0
    shard = 1024 * 512 * 2
    assert totals == {
        ("all-gather", ("data",), shard): 6 + 6 + 6,  # weights forward and backward; gradients after their sum
        ("all-gather", ("model",), shard): 6 + 6,  # activations forward and backward
        ("reduce-scatter", ("data",), shard): 6,
        ("reduce-scatter", ("model",), shard): 6,
        ("all-reduce", ("replica",), shard // 2): 6,
    }
    assert {c.link for c in found.over("replica")} == {BETWEEN}
    assert {c.link for c in found.collectives if c.axes != ("replica",)} == {INSIDE}
    assert {c.kind for c in found.collectives if c.is_async} == {"all-gather", "all-reduce"}


def scattered_and_gathered(x):
    y = jnp.cos(jax.lax.all_gather(jnp.sin(jax.lax.psum_scatter(x, "data", tiled=True)), "data", tiled=True))
    return jnp.sin(jax.lax.psum(jnp.sin(jax.lax.psum(y, "model")), "replica")).sum()


@pytest.mark.parametrize(
    ("topology", "count", "sizes", "scatter"),
    [
        ("v5e:4x4", 1, (1, 4, 4), "reduce-scatter"),
        ("v5e:8x8", 2, (2, 16, 4), "all-reduce"),
        ("v5p:4x4x4", 1, (2, 8, 4), "all-reduce"),
    ],
)
def test_meshes_of_many_chips(topology, count, sizes, scatter):
    """Among eight chips or more the compiler makes an all-reduce of what is traced as a reduce-scatter."""
    mesh = slices(sizes, topology, count)
    found = audit(compile_mapped(scattered_and_gathered, mesh), mesh)
    assert not found.unknown()
    whole = [(c.kind, c.axes, c.link) for c in found.collectives if c.bytes == FLOATS * 4]
    expected = [(scatter, "data", INSIDE), ("all-gather", "data", INSIDE)]
    sums = [("all-reduce", "model", INSIDE), ("all-reduce", "replica", BETWEEN if count > 1 else INSIDE)]
    expected += [each for each in sums if mesh.shape[each[1]] > 1]
    assert whole == [(kind, (axis,), link) for kind, axis, link in expected]


def test_an_axis_that_spans_slices_is_crossed_in_parts():
    """Eight devices along data in two slices: parts of the axis inside a slice, the rest of it between slices."""
    mesh = slices((1, 8, 1))
    found = audit(compile_mapped(lambda x: jax.lax.psum(x, "data").sum(), mesh), mesh)
    assert {c.axes for c in found.collectives} == {("data",)}
    assert {c.link for c in found.collectives} == {INSIDE, BETWEEN}


def shortened(text):
    """What the audit reads of a text: without tables of source files and without most of the compiler's own notes."""
    text = re.sub(r"\nFileNames\n.*?(?=\n%)", "\n", text, flags=re.DOTALL)
    text = re.sub(r" stack_frame_id=\d+", "", text)
    keep = "async_collective_fusion_config"
    lines = [line if keep in line else re.sub(r", backend_config=\{.*", "", line) for line in text.splitlines()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for program, build in PROGRAMS.items():
        (Path(__file__).parent / "fixtures" / f"{program}.txt").write_text(shortened(build(slices()).as_text()))
