"""Two processes export one model together: each writes what its devices have, into the same files."""

import pytest

from gregale.cli import main
from tests.huggingface.hub import made
from tests.process.two import gregale_in_two

pytest.importorskip("transformers")


def test_both_write_the_same_files(tmp_path):
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
