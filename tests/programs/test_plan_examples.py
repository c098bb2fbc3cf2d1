"""Every example in config/ is annotated, passes all checks and fits the hardware that it names.

They are compiled as far as the memory report: those for GPUs by the compiler for TPUs with as much memory, because that
for GPUs is not installed.
"""

import draccus
import pytest

from gregale.cost.chips import GIB, chip
from gregale.cost.collectives import INSIDE
from gregale.cost.hlo import parse, walk
from gregale.cost.overlap import ends
from gregale.cost.pallas_cost import grouped_of
from gregale.data.tokenizers import BpeConfig
from gregale.programs.plan.command import tokens_of
from gregale.programs.plan.devices import simulated_target, topology_target
from gregale.programs.plan.step import MEMORY, Plan, plan_step
from gregale.runs.config import TrainConfig
from gregale.runs.history import flat
from gregale.runs.parsing import load, read_yaml
from tests.programs.plans import CONFIGS

ON_TPU = {"llama_8b_two_slices": ("v5e:8x8", 2), "llama_8b_131k": ("v5e:8x8", 2), "llama_7b_512": ("v5e:8x8", 8)}
WITH_EXPERTS = {"qwen3_30b_a3b": ("v5e:16x16", 2)}
ON_GPU = {"mistral_7b": (8, "A100"), "qwen3_600m": (8, "A100"), "llama_124m_gpu": (1, "A100-40GB")}
ON_CPU = {"quickstart": 8, "chat_small": 2, "experts_small": 8, "diloco_small": 4, "islands": 2, "staged": 4}
ON_CPU |= {"opendiloco": 1}
ALL_IN_HOST_MEMORY = GIB  # of all simulated devices together, on any machine
LIKE_GPUS = {8: "v5p:2x2x2", 1: "v5p:1x1x1"}  # devices with 95 GB each


def config_of(name: str, *changes: str) -> TrainConfig:
    return load(TrainConfig, CONFIGS / f"{name}.yaml", changes)


def tokens_in(config: TrainConfig) -> int:
    tokenizer = config.data.tokenizer
    return tokenizer.vocabulary if isinstance(tokenizer, BpeConfig) else tokens_of(config)


def compiled(name: str, topology: str, slices: int) -> Plan:
    config = config_of(name)
    return plan_step(config, tokens_in(config), topology_target(topology, slices, None), MEMORY)


def test_every_example_is_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*ON_TPU, *WITH_EXPERTS, *ON_GPU, *ON_CPU}
    for path in CONFIGS.glob("*.yaml"):
        first, *rest = path.read_text().splitlines()
        assert first.startswith("# "), path
        assert any("#" in line and not line.startswith("#") for line in rest), path


def test_no_example_has_an_earlier_key():
    for path in CONFIGS.glob("*.yaml"):
        given, present = flat(read_yaml(path)[0]), flat(draccus.encode(config_of(path.stem)))
        assert given.keys() <= present.keys(), path


@pytest.mark.parametrize("name", ["llama_8b_two_slices", pytest.param("llama_7b_512", marks=pytest.mark.soak)])
def test_an_example_for_tpus_fits(name):
    plan = compiled(name, *ON_TPU[name])
    assert plan.step.shortage is None
    assert plan.memory.peak <= 15.75 * GIB, "which the compiler has for programs on a v5e"
    assert plan.memory.peak > plan.memory.arguments > 0
    sent = sum(each.bytes_sent * each.times for each in plan.step.audit.over("replica"))
    assert sent == pytest.approx(plan.setup.method.bytes_sent(1), rel=1e-3), "nothing is padded"
    hidden = ends(parse(plan.step.text))
    inside = [each for each in plan.step.audit.collectives if each.loops and each.link == INSIDE]
    waited_for = [each.bytes for each in inside if each.name not in hidden]
    assert max(waited_for) <= 32 * 2**20, "sums of gradients are not merged into one that is waited for"


def test_the_example_with_experts_fits():
    """Its products are grouped; no loop crosses the slow link."""
    plan = compiled("qwen3_30b_a3b", *WITH_EXPERTS["qwen3_30b_a3b"])
    assert plan.step.shortage is None
    assert plan.memory.peak <= 15.5 * GIB, "with its code it is within 15.75"
    found = plan.step.audit
    assert not [each for each in found.over("replica") if each.loop]
    assert not [each for each in found.collectives if each.kind == "collective-permute"]
    sent = sum(each.bytes_sent * (each.times or 1) for each in found.over("replica"))
    assert sent == pytest.approx(plan.setup.method.bytes_sent(1), rel=1e-3)
    module = parse(plan.step.text)
    sites = [(each.frame.computation, each.instruction) for each in walk(module, {})]
    products = [site for site in sites if grouped_of(*site)]
    assert len(products) == 2 * (3 + 2 + 5), "forward, again, backward; the compiler peels one layer off the loops"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.soak) for name in ON_GPU])
def test_an_example_for_gpus_fits(name):
    count, gpu = ON_GPU[name]
    plan = compiled(name, LIKE_GPUS[count], 1)
    assert plan.step.shortage is None
    assert plan.memory.peak <= chip(gpu).memory_bytes


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.soak) for name in ON_CPU])
def test_an_example_for_cpu_devices_fits(name):
    config = config_of(name)
    plan = plan_step(config, tokens_in(config), simulated_target(config, ON_CPU[name], None), MEMORY)
    assert ON_CPU[name] * plan.memory.peak <= ALL_IN_HOST_MEMORY
