"""The closed form of memory beside the TPU compiler's peaks, which are stored: none is compiled here.

Each figure is `memory.peak` of

    gregale plan BASE.yaml --topology v5e:2x4 --until memory --json KEYS

with BASE.yaml as below, by jax 0.10 and libtpu. They differ in stages, repeats, microbatches, window, `remat`, layers
of a stage, and in vocabularies and widths that are no multiples of a lane or a power of two.
"""

import json
from dataclasses import replace

import pytest

from benchmarks.memory_sweep import SWEEP, compiled_peak, setup_of
from gregale.cost.estimate import ACCELERATOR, CPU, TPU, compared_steps, is_compared, kind_of, sizes_of
from gregale.programs.plan.devices import topology_target
from gregale.programs.plan.estimates import estimate, step_shape
from gregale.programs.plan.step import setup_for
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load

BASE = {
    "name": "stored",
    "steps": 1000,
    "mesh": {"replica": 1, "data": -1},
    "model": {
        "type": "llama",
        "layers": 8,
        "hidden": 2048,
        "heads": 16,
        "kv_heads": 8,
        "mlp": 8192,
        "vocabulary": 32768,
        "rotary_base": 500000,
    },
    "compute": {"dtype": "bfloat16", "gather": "per_layer"},
    "batch": {"size": 16, "sequence_length": 4096, "microbatches": 1},
    "optimizer": {"type": "adamw", "learning_rate": 3.0e-4},
}
NARROW = "model.hidden=2496 model.heads=26 model.kv_heads=13 model.mlp=6656 model.vocabulary=100277"
LLAMA_8B = "start_from=a model.layers=32 model.hidden=4096 model.heads=32 model.mlp=14336 model.vocabulary=128256"
PEAKS = {
    f"{LLAMA_8B} batch.size=8 adapter.base=dtype": 5693581824,
    f"{LLAMA_8B} batch.size=8 adapter.base=nf4": 4090767872,
    f"{LLAMA_8B} batch.size=8 adapter.base=nf4 adapter.targets=[query,key,value,out,gate,up,down]": 4157990400,
    f"{LLAMA_8B} batch.size=8 mesh.stage=2 pipeline.repeats=2 adapter.base=nf4": 9086030336,
    "start_from=a mesh.stage=2 pipeline.repeats=1 adapter.targets=[query,key,value,out,gate,up,down]": 5223493120,
    "start_from=a mesh.stage=2 mesh.model=2 pipeline.repeats=2 adapter.base=nf4": 2649461248,
    "start_from=a batch.size=8 compute.remat=none adapter.targets=[query,value]": 3534208000,
    "start_from=a batch.size=8 compute.remat=none adapter.targets=[out,gate]": 3672062976,
    "start_from=a compute.remat=projections adapter.targets=[gate,up,down]": 4480311808,
    "mesh.stage=2 pipeline.repeats=1": 6401921536,
    "mesh.stage=2 pipeline.repeats=2": 5431305728,
    "mesh.stage=2 pipeline.repeats=4": 3259857408,
    "mesh.stage=2 pipeline.repeats=2 pipeline.gather=once": 6189347840,
    "mesh.stage=2 pipeline.repeats=2 pipeline.gather=per_iteration": 4296834560,
    "mesh.stage=2 pipeline.repeats=4 pipeline.gather=per_iteration": 2821064704,
    "mesh.stage=2 pipeline.repeats=2 pipeline.remat=context": 5837940224,
    "mesh.stage=2 pipeline.repeats=2 pipeline.remat=projections": 10680591872,
    "mesh.stage=2 pipeline.repeats=4 pipeline.remat=projections": 7030502400,
    "mesh.stage=2 pipeline.repeats=4 batch.size=64 pipeline.microbatches=8": 4811995648,
    "mesh.stage=2 pipeline.repeats=2 batch.size=64 batch.microbatches=4": 5809828352,
    "mesh.stage=2 pipeline.repeats=2 pipeline.delay_forwarding=true": 4538104832,
    "mesh.stage=2 pipeline.repeats=2 mesh.model=2": 5114086400,
    "mesh.stage=2 pipeline.repeats=4 model.vocabulary=128256": 5131901440,
    "mesh.stage=4 pipeline.repeats=2 batch.size=32": 4720655872,
    "mesh.stage=4 pipeline.repeats=1 batch.size=32": 6445689344,
    "mesh.model=2 compute.remat=none": 8223186432,
    "mesh.context=2 mesh.model=4 compute.remat=context": 3523579392,
    f"{NARROW}": 4930872320,
    f"{NARROW} batch.microbatches=2": 4910406656,
    f"{NARROW} model.vocabulary=100352 batch.microbatches=2": 4911143936,
    f"{NARROW} compute.remat=projections": 8187471360,
    "model.vocabulary=128256": 4642096128,
    "model.vocabulary=128256 batch.size=32 batch.microbatches=2": 5290594816,
}


@pytest.fixture(scope="module")
def target():
    return topology_target("v5e:2x4", 1, None)


@pytest.mark.parametrize("keys", PEAKS)
def test_the_closed_form_is_within_a_tenth_of_the_compiler(keys, target, tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(json.dumps(BASE))  # JSON is YAML
    config = load(TrainConfig, path, [f"--{each}" for each in keys.split()])
    setup = setup_for(config, 257, target)
    assert estimate(setup, target.backend).peak == pytest.approx(PEAKS[keys], rel=0.1)


@pytest.mark.parametrize("row", SWEEP, ids=str)
def test_compiled_peaks_of_public_models_are_within_the_stated_range(row):
    setup = setup_of(row)
    step, stored = step_shape(setup), compared_steps()[str(row)]
    assert (stored["kind"], stored["sizes"]) == (kind_of(step), sizes_of(step))
    low, high = TPU.range(estimate(setup, TPU).peak)
    assert low <= stored["peak"] <= high
    assert is_compared(step, TPU)


@pytest.mark.soak
@pytest.mark.parametrize("row", SWEEP, ids=str)
def test_the_compiler_has_the_stored_peaks(row):
    assert compiled_peak(row, setup_of(row)) == pytest.approx(compared_steps()[str(row)]["peak"], rel=0.01)


def test_only_steps_between_compared_ones_are_certain():
    """By all sizes, by policy, windows, numbers and axes of the mesh, and of the TPU compiler alone."""
    step = step_shape(setup_of(next(row for row in SWEEP if row.model == "qwen3-4b")))
    assert is_compared(step, TPU)
    others = (
        {"layers": 15},
        {"layers": 49},
        {"rows": 2 * step.rows},
        {"rows": step.rows // 4},
        {"microbatches": 4, "rows": 4 * step.rows},
        {"compute_bytes": 4},
        {"remat": "offload"},
        {"matmul": "int8"},
        {"per_step": True},
        {"scores": True},
    )
    for change in others:
        assert not is_compared(replace(step, **change), TPU), change
    assert not any(is_compared(step, backend) for backend in (CPU, ACCELERATOR))
