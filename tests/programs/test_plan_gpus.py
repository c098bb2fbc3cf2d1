"""`plan` for NVIDIA GPUs that are not there; without their compiler, what is asked of it and what is refused."""

import json
import re
from importlib.util import find_spec

import pytest

from gregale.cli import main
from gregale.cost.chips import chip
from gregale.errors import UserError
from gregale.programs.plan import devices
from gregale.programs.plan.devices import CUDA_PLUGINS, GPUS, gpu_description, topology_target
from tests.programs.plans import CONFIGS

INSTALLED = any(find_spec(plugin) for plugin in CUDA_PLUGINS)
SMALL = [
    *("--topology", "h100:4", "--slices", "2", "--mesh.replica", "2", "--model.layers", "3", "--model.hidden", "128"),
    *("--model.heads", "2", "--model.mlp", "256", "--model.vocabulary", "512", "--data.tokenizer.vocabulary", "512"),
    *("--batch.size", "32", "--batch.sequence_length", "128", "--batch.microbatches", "2"),
]


def test_a_description_has_the_chips_own_figures():
    """One field a line, braces closed; what the table of chips has is not written twice."""
    for name, gpu in GPUS.items():
        found, text = chip(name), gpu_description(gpu, 13)
        fields = dict(re.findall(r"(\w+): (\S+)", text))
        assert text.count("{") == text.count("}") == 4
        assert int(fields["device_memory_size"]) == found.memory_bytes
        assert int(fields["memory_bandwidth"]) == found.memory_bytes_per_second
        # a multiply-add in each adder at each tick: the float32 figure that the vendor prints for the chip
        teraflops = 2 * gpu.cores * gpu.adders * gpu.clock_ghz / 1e3
        assert teraflops == pytest.approx({"A": 19.5, "H": 67, "B": 75}[gpu.chip[0]], rel=0.02)


def test_a_topology_that_is_none_is_refused():
    for topology in ("h100", "h100:0", "h100:x", "h100:\u0668", "v9:2x2"):
        with pytest.raises(UserError, match=r"is not FAMILY:SHAPE, such as v5e:4x4, .* h100:8; .* a100, h100"):
            topology_target(topology, 1, None)
    with pytest.raises(UserError, match=r"'h100:4x2': of GPUs it is a number in a box, such as h100:8"):
        topology_target("h100:4x2", 1, None)


def test_without_their_compiler_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"compiler for NVIDIA GPUs, .* is not installed\. Run `.* '\.\[cuda\]'`"):
        topology_target("h100:8", 1, None)


@pytest.mark.skipif(not INSTALLED, reason="the compiler for GPUs is not installed")
def test_two_boxes_are_planned_by_the_real_compiler(capsys, compiled_anew):
    assert main(["plan", str(CONFIGS / "llama_124m_gpu.yaml"), *SMALL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device_kind"] == "NVIDIA H100 80GB HBM3"
    assert report["kernels"]["attention"] == "cudnn"
    assert report["fits"]
    step = report["programs"]["step"]
    assert {each["link"] for each in step["collectives"] if "replica" in each["axes"]} == {"between slices"}
    assert all(not each["loop"] for each in step["collectives"] if "replica" in each["axes"])
    sent = report["methods"]["psdp"]["bytes_per_step"]["average"]
    assert report["roofline"]["sent_bytes"]["between slices"] == pytest.approx(sent, rel=1e-2)
