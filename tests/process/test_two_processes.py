"""Two processes export one model together, and train nothing if their settings differ."""

import re

import pytest

from gregale.cli import main
from tests.huggingface.hub import made
from tests.process.two import gregale_in_two
from tests.programs.tiny import write_inputs


def test_both_write_what_their_devices_have_into_the_same_files(tmp_path):
    pytest.importorskip("transformers")
    made("gemma3", tmp_path / "hub", "20KB", "bfloat16")
    assert main(["import", str(tmp_path / "hub"), str(tmp_path / "mine")]) == 0
    target = tmp_path / "target" / "out"
    flags = "--xla_force_host_platform_device_count=2"
    outputs = gregale_in_two(tmp_path, "export", str(tmp_path / "mine"), str(target), flags=flags)
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    assert "a gemma3_text in bfloat16" in outputs[0][1]
    theirs = {path.name: path.read_bytes() for path in (tmp_path / "hub").glob("*.safetensors*")}
    assert len(theirs) > 3
    assert {path.name: path.read_bytes() for path in target.glob("*.safetensors*")} == theirs
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_another_environment_is_refused_by_both_with_its_name(tmp_path):
    inputs = write_inputs(tmp_path / "inputs")
    common = ("--cpu_devices", "2", "--mesh.replica", "1", "--mesh.model", "1", "--runs", "refused")
    found = gregale_in_two(inputs, "train", "tiny.yaml", *common, variables={"JAX_ENABLE_X64": "1"})
    assert [code for code, _, _ in found] == [2, 2], found
    errors = [[line for line in err.splitlines() if "error" in line] for _, _, err in found]
    assert errors[0] == errors[1], "both give the same reason"
    assert "jax_enable_x64 is false in process 0 (" in errors[0][0]
    assert "), but true in process 1 (" in errors[0][0]


def test_what_has_to_be_equal_is_refused_by_both_before_the_first_step(tmp_path):
    inputs = write_inputs(tmp_path / "inputs")
    common = ("--cpu_devices", "2", "--mesh.replica", "1", "--mesh.model", "1", "--runs", "refused")
    different = ("--optimizer.learning_rate", "0.02")
    found = gregale_in_two(inputs, "train", "tiny.yaml", *common, different=different)
    assert [code for code, _, _ in found] == [2, 2], found
    errors = [[line for line in err.splitlines() if "error" in line] for _, _, err in found]
    assert errors[0] == errors[1], "both give the same reason"
    assert not any("Traceback" in err for _, _, err in found)
    names = [rf"process {number} \([\w.-]+, pid \d+\)" for number in range(2)]
    (said,) = errors[0]
    assert re.search(r"optimizer\.learning_rate is 0\.01 in {}, but 0\.02 in {}".format(*names), said), said
    assert not (inputs / "refused").exists(), "nothing was begun"
