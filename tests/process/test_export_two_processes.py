"""Two processes export one model together: each writes what its devices have, into the same files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import Popen
from tests.huggingface.hub import made
from tests.ports import free_port
from tests.programs.tiny import finished

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    from gregale.cli import main

    folder = tmp_path_factory.mktemp("hub")
    made("gemma3", folder / "hub", "20KB", "bfloat16")
    assert main(["import", str(folder / "hub"), str(folder / "mine")]) == 0
    return folder / "mine"


def exported(imported: Path, target: Path) -> list[tuple[int, str, str]]:
    join = ["--distributed.coordinator", f"127.0.0.1:{free_port()}", "--distributed.processes", "2"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "gregale", "export", str(imported), str(target), *join]
    processes = [
        Popen(
            [*command, "--distributed.process", str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [finished(process) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_both_write_the_same_files(imported, tmp_path):
    outputs = exported(imported, tmp_path / "out")
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    assert "a gemma3_text in bfloat16" in outputs[0][1]
    theirs = {path.name: path.read_bytes() for path in (imported.parent / "hub").glob("*.safetensors*")}
    assert len(theirs) > 3
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.safetensors*")} == theirs
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    outputs = exported(imported, tmp_path / "out")
    assert [code for code, _, _ in outputs] == [2, 2], outputs
    assert "exists already" in outputs[0][2]
    assert "process 0 ended the run and gave the reason" in outputs[1][2]
