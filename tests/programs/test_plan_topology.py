"""`plan` for TPU topologies, by the TPU compiler, on a machine without a TPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gregale.cli import main
from gregale.cost.chips import GIB
from gregale.data.tokenizers import FileConfig
from gregale.errors import UserError
from gregale.programs.plan.command import tokens_of
from gregale.programs.plan.devices import topology_target
from gregale.programs.plan.report import report_of
from gregale.programs.plan.step import compiled_for, largest_buffers, plan_step, refused_sizes
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.programs.plans import CONFIGS, QUICKSTART, tables

pytestmark = pytest.mark.usefixtures("compiled_anew")  # a program that does not fit is compiled twice

TOPOLOGY = "v5e:2x2"
# One row of a wide MLP is too much for a device: only split layers help, and then more microbatches are needed.
WIDE = [
    *("--cpu_devices", "null", "--mesh.replica", "1", "--mesh.data", "4", "--mesh.model", "1", "--model.layers", "2"),
    *("--model.hidden", "4096", "--model.heads", "8", "--model.kv_heads", "4", "--model.mlp", "65536"),
    *("--batch.size", "4", "--batch.sequence_length", "16384", "--batch.microbatches", "1"),
    *("--compute.attention", "auto", "--compute.dtype", "bfloat16", "--compute.remat", "context"),
]


def planned(capsys, *arguments) -> dict:
    """The report of the command, as far as the memory report."""
    command = ["plan", QUICKSTART, "--topology", TOPOLOGY, *WIDE, "--until", "memory", "--json", "--require-fit"]
    code = main([*command, *arguments])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["fits"] else 3)
    return report


@pytest.fixture(scope="module")
def refused() -> dict:
    """The report of the step that does not fit."""
    plan = plan_step(load(TrainConfig, QUICKSTART, WIDE), 257, topology_target(TOPOLOGY, 1, None))
    return json.loads(json.dumps(report_of(plan, 257, None)))


def test_the_compiler_logs_no_errors_about_the_missing_tpu():
    program = (
        "from gregale.programs.plan import devices; print(len(devices.topology_target('v5e:4x4', 2, None).devices))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "32\n", "")


def test_a_step_that_the_compiler_refuses_is_reported_with_its_sizes(refused):
    memory = refused["memory"]
    assert not refused["fits"]
    assert refused["programs"]["step"]["refused"]
    assert memory["chip"] == int(15.75 * GIB), "as the compiler says, not as the vendor prints"
    assert 18 * GIB < memory["peak"] < 40 * GIB
    assert memory["largest"][0]["bytes"] == 8 * GIB
    assert "bf16[4,2,16384,16384]" in memory["largest"][1]["shapes"]
    assert {each["axes"] == ["data"] and each["times"] for each in refused["collectives"]} >= {1, 2}, "its schedule"
    assert refused["compiler_flops_per_device"] is None
    text = tables(refused)
    assert f"It does not fit: {memory['peak'] / GIB:.2f} GiB of 15.75 GiB" in text
    assert "The compiler rejects 'step'. Its largest buffers:\n  8.00 GiB: " in text


@pytest.fixture
def without_remedies(monkeypatch):
    monkeypatch.setattr("gregale.programs.plan.command.remedies", lambda *_: [])


def test_the_memory_report_alone_says_the_same_of_it(refused, capsys, without_remedies):
    found = planned(capsys)
    assert found["until"] == "memory"
    assert any("--until code" in note for note in found["notes"])
    for key in ("memory", "fits", "collectives", "bytes_per_step", "roofline"):
        assert found[key] == refused[key], key


@pytest.mark.soak  # some ten compilations
def test_a_remedy_of_several_keys_fits(capsys):
    found = [(each["change"], each["fits"]) for each in planned(capsys)["remedies"]]
    changes = [{*change.split()} for change, fits in found if fits]
    assert any("--batch.microbatches" in each and each & {"--mesh.context", "--mesh.model"} for each in changes)


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("Ran out of memory on HBM, the total memory required for HLO temporaries (18.89G) exceeds available HBM "
         "(15.75G).", (round(18.89 * GIB), int(15.75 * GIB))),
        ("Ran out of memory in memory space hbm. Used 512.50M of 128.00M hbm. Exceeded hbm capacity by 384.50M.",
         (int(512.5 * 2**20), 128 * 2**20)),
        ("Ran out of memory in memory space vmem. Used 17.00M of 16.00M vmem.", None),
        ("INTERNAL: something else", None),
    ],
)  # fmt: skip
def test_sizes_in_the_compilers_messages(message, sizes):
    assert refused_sizes(message) == sizes


def test_largest_buffers_are_those_of_the_devices_memory():
    report = """Memory Space: default (color=0)
Total bytes: 42431086592 (39.52GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   25.00GiB( 62%);   25.00GiB;      3686400;                4; 2×f32[1,4,8,8], 2×f32[1,4,1], (s32[2], u32[])
   37.50GiB( 94%);   12.50MiB;  26847232000;                4; bf16[4,40960,40960]

Memory Space: vmem (color=1)
   80.00MiB( 21%);   80.00MiB;            0;               30; bf16[1,40960,1,512]
"""
    assert largest_buffers(report) == [
        (25 * GIB, "2×f32[1,4,8,8], 2×f32[1,4,1] and 1 more"),
        (int(12.5 * 2**20), "bf16[4,40960,40960]"),
    ]


def test_a_program_that_is_refused_for_another_reason_is_one_clear_line():
    """A kernel whose blocks do not fit the memory beside the matrix unit."""
    target = topology_target("v5e:2x2", 1, None)
    mesh = Mesh(np.array(target.devices), "data")
    kernel = pl.pallas_call(
        lambda x, y: y.__setitem__(..., x[...] + 1), jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    )
    program = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.float32, sharding=NamedSharding(mesh, P()))
    with pytest.raises(UserError, match=r"the compiler rejects the program 'step': .*vmem") as error:
        compiled_for(target, "step", program.lower(x), 0)
    assert "\n" not in str(error.value)


def test_a_model_with_its_vocabulary_needs_no_tokenizer_file():
    config = load(TrainConfig, CONFIGS / "llama_8b_two_slices.yaml", [])
    assert isinstance(config.data.tokenizer, FileConfig)
    assert not Path(config.data.tokenizer.path).exists()
    assert tokens_of(config) == 128256
    unknown = load(TrainConfig, CONFIGS / "llama_8b_two_slices.yaml", ["--model.vocabulary", "null"])
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        tokens_of(unknown)
