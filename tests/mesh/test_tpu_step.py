"""The PSDP step as the real TPU compiler makes it for two slices, on a machine without a TPU."""

import re
from dataclasses import replace
from math import prod

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gregale.axes.layout import MeshConfig
from gregale.cost import Audit
from gregale.cost.collectives import BETWEEN, INSIDE
from gregale.cost.hlo import parse
from gregale.cost.memory import compiler_memory
from gregale.cost.overlap import DENSE
from gregale.errors import UserError
from gregale.model.config import ComputeConfig
from gregale.model.llama import LlamaConfig
from gregale.optim import MuonConfig
from gregale.programs.plan.devices import Target, topology_target
from gregale.programs.plan.estimates import tree_bytes
from gregale.programs.plan.report import kernels_of, report_of
from gregale.programs.plan.step import DUMPED, MEMORY, Plan, plan_step, read_dump
from gregale.runs.config import BatchConfig, TrainConfig
from tests.programs.plans import tables

pytestmark = pytest.mark.usefixtures("compiled_anew")  # plans tell what the compiler warns of

MICROBATCHES = 4
# The compiler ends itself over a branch in a loop of which it pipelines the sums: two kinds of layers make none.
WINDOWS = {"sliding_window": 64, "full_layers": (1, 3)}
MODEL = LlamaConfig(layers=4, hidden=256, heads=2, kv_heads=2, mlp=256, vocabulary=1024, **WINDOWS)
CONFIG = TrainConfig(
    name="scaled-quickstart",
    steps=300,
    mesh=MeshConfig(replica=2, data=2, model=2),
    model=MODEL,
    compute=ComputeConfig(dtype="bfloat16", remat="none"),
    batch=BatchConfig(size=32, sequence_length=128, microbatches=MICROBATCHES),
)
TOKENS = 1024


@pytest.fixture(scope="module")
def target() -> Target:
    return topology_target("v5e:2x2", slices=2, chip_name=None)


@pytest.fixture(scope="module")
def plan(target) -> Plan:
    return plan_step(CONFIG, TOKENS, target)


def test_its_total_is_the_compilers_own_peak(target, tmp_path):
    """Of a program whose arrays are large beside its code."""
    mesh = Mesh(np.array(target.devices), "all")
    x = jax.ShapeDtypeStruct((16384, 16384), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    lowered = jax.jit(lambda x: jax.numpy.sum(jax.numpy.tanh(x @ x) @ x)).lower(x)
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(tmp_path), **DUMPED})
    reported = read_dump(tmp_path, 0, None, "step").memory.peak
    assert reported == pytest.approx(compiler_memory(compiled, has_peak=True).peak, rel=0.01)
    assert reported > 2**30


def between_slices_in_loops(found: Audit) -> list:
    return [each for each in found.collectives if each.loops and each.link == BETWEEN]


def test_nothing_crosses_slices_inside_the_microbatch_loop(plan):
    assert between_slices_in_loops(plan.step.audit) == []
    inside = [each for each in plan.step.audit.collectives if each.loops]
    assert len(inside) > 10
    assert {each.link for each in inside} == {INSIDE}
    assert {each.times for each in inside} >= {MICROBATCHES, MICROBATCHES * 2}, "two patterns of two layers"
    assert plan.setup.compiler_options["xla_tpu_enable_ici_ar_pipelining"]
    assert " conditional(" not in plan.step.text


def test_layers_with_a_loop_of_their_own_compile(target):
    """The compiler ends itself over one of which it pipelines the sums of several microbatches."""
    model = replace(MODEL, layers=2, sliding_window=None, full_layers=())
    compute = replace(CONFIG.compute, attention="xla")  # which has no largest scores of its own
    config = replace(CONFIG, model=model, compute=compute, optimizer=MuonConfig(qk_clip=50.0))
    found = plan_step(config, TOKENS, target, MEMORY)
    assert found.setup.compiler_options["xla_tpu_enable_ici_ar_pipelining"] is False
    assert between_slices_in_loops(found.step.audit) == []


def test_each_update_crosses_once(plan):
    far = [each for each in plan.step.audit.collectives if each.link == BETWEEN]
    assert {each.times for each in far} == {1}
    parameters, padding = tree_bytes(plan.setup).parameters, 8192  # of scalars and small arrays
    for kind in ("reduce-scatter", "all-gather"):
        assert sum(each.bytes for each in far if each.kind == kind) == pytest.approx(parameters, abs=padding)
    assert sum(each.bytes_sent for each in far) == pytest.approx(plan.setup.method.bytes_sent(1), abs=2 * padding)
    assert all(each.is_async for each in far)


def test_what_is_hidden_is_weighed_by_cycles(plan):
    """Some of the reduction over replicas has compute behind it, but far less than it takes on a slow link."""
    slow, fast = (plan.schedule(plan.step, speed).links[BETWEEN] for speed in (25e9 / 8 / 4, 1e14))
    assert slow.seconds == pytest.approx(slow.hidden + slow.exposed)
    assert 0 < slow.hidden < 0.1 * slow.seconds
    assert fast.hidden > 0.5 * fast.seconds
    inside = plan.schedule(plan.step, None).links[INSIDE]
    assert 0 < inside.hidden < inside.seconds


def test_the_time_is_a_range_and_lists_the_kernels_that_the_table_lacks(plan):
    report = report_of(plan, TOKENS, None)
    found, calibrated = report["estimate"], report["estimate"]["calibrated"]
    assert found["unlisted_kernels"] == ["splash_mha_fused 128 128", "splash_mha_fwd 128 128"]
    assert any("the table of kernels lacks splash_mha_fused 128 128, splash" in note for note in report["notes"])
    text = tables(report)
    for key in ("utilisation", "utilisation_full_attention"):
        assert found[key] / calibrated[key] == pytest.approx(DENSE.mean)
        assert f"{calibrated[key]:.1%} to {found[key]:.1%}" in text
    assert calibrated["seconds"] == pytest.approx(DENSE.mean * found["seconds"])
    assert found["utilisation"] < found["utilisation_full_attention"] < 1


def test_the_heads_gradient_is_summed_in_the_loop(plan):
    """Moved out of it, its buffer would not be split over `data`."""
    inside = [each for each in plan.step.audit.over("data") if each.loop and each.kind != "all-gather"]
    table = MODEL.hidden * TOKENS // 2
    assert sum(size == table for each in inside for shape in each.shapes for size in [prod(shape)]) == 1


def test_the_embeddings_rows_are_exchanged(plan):
    """There and back in each microbatch; of the table and its gradient nothing is sent over `data`."""
    rows = [each for each in plan.step.audit.over("data") if each.kind == "all-to-all"]
    tokens = CONFIG.batch.size * CONFIG.batch.sequence_length // (4 * MICROBATCHES)
    assert [(each.bytes, each.times) for each in rows] == [(tokens * MODEL.hidden * 2, MICROBATCHES)] * 2


def test_the_stream_is_split_over_model(plan):
    """Sums of products are reduce-scatters, and gathers precede the next: no device sums or has all of a stream."""
    over = [each for each in plan.step.audit.over("model") if each.loop]
    stream = CONFIG.batch.size * CONFIG.batch.sequence_length // (4 * MICROBATCHES) * MODEL.hidden * 2
    assert not [each for each in over if each.kind == "all-reduce" and each.bytes >= stream]
    for kind in ("reduce-scatter", "all-gather"):
        found = sum(each.bytes * each.times for each in over if each.kind == kind)
        assert found % stream == 0
        assert found >= 4 * stream


def test_attention_is_a_kernel_on_each_devices_heads(plan):
    assert kernels_of(plan.setup) == {"rules": "tpu", "attention": "splash"}
    kernels = [
        instruction
        for computation in parse(plan.step.text).computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "custom-call" and instruction.name.startswith("splash_mha")
    ]
    assert {each.name.partition(".")[0].split("_")[2] for each in kernels} == {"fwd", "fused"}
    heads, width = MODEL.heads // 2, MODEL.HeadSize.size
    for each in kernels:
        assert any(shape.sizes[-3:] == (heads, CONFIG.batch.sequence_length, width) for shape in each.shapes)


@pytest.mark.parametrize("remat", ["offload", "context_offload"])
def test_what_the_compiler_cannot_unroll_is_refused(target, remat):
    compute = replace(CONFIG.compute, remat=remat, unroll=2)
    with pytest.raises(UserError, match=f"compute.remat is {remat} and compute.unroll is 2: .*unroll: 1 would work"):
        plan_step(replace(CONFIG, compute=compute), TOKENS, target)


@pytest.mark.parametrize(
    ("name", "slices", "message"),
    [
        ("v5x:2x2", 1, ".*'v5x:2x2' is not FAMILY:SHAPE.*"),
        ("v5e", 1, ".*'v5e' is not FAMILY:SHAPE.*"),
        ("v5e:3x7", 1, ".*does not take 'v5e:3x7'.*"),
    ],
)
def test_a_wrong_topology_is_refused_in_one_line(name, slices, message):
    with pytest.raises(UserError) as error:
        topology_target(name, slices, None)
    assert re.fullmatch(message, str(error.value))


def test_slices_that_do_not_fit(target):
    config = replace(CONFIG, mesh=MeshConfig(replica=1, data=4, model=2))
    with pytest.raises(UserError, match="the devices are 2 slices"):
        plan_step(config, TOKENS, target)
