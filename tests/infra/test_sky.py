"""`infra/sky.yaml`: it has the keys of SkyPilot, commands that Gregale takes, and the exit codes of the docs."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT
from tests.infra.stand_ins import write_program

TASK = yaml.safe_load((ROOT / "infra" / "sky.yaml").read_text())
NODES = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NODE_RANK": "1"}


def test_it_has_what_skypilot_asks_for_and_recovers_from_the_codes_after_which_the_same_job_goes_on():
    assert set(TASK) == {"name", "workdir", "resources", "num_nodes", "envs", "setup", "run"}
    assert set(TASK["resources"]) == {"accelerators", "use_spot", "disk_size", "job_recovery"}
    assert all(isinstance(value, str) for value in TASK["envs"].values())
    used = set(re.findall(r"\$(\w+)", TASK["setup"] + TASK["run"])) - {"joining", "first"}
    assert used == {*TASK["envs"], *NODES}
    table = (ROOT / "docs" / "trouble.md").read_text()
    rows = re.findall(r"^\| ([\d, ]+) \| .*the scheduler may start .*\|$", table, re.MULTILINE)
    codes = [int(code) for row in rows for code in row.split(",")]
    assert TASK["resources"]["job_recovery"]["recover_on_exit_codes"] == sorted(codes)


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Carries out `run` with a gregale that prints its words."""
    write_program(folder / ".venv" / "bin" / "gregale", '#!/bin/bash\nprintf "%q " "$@"\n')
    environment = {**os.environ, **TASK["envs"], "SKYPILOT_NUM_NODES": "1", **environment}
    return subprocess.run(["bash", "-c", TASK["run"]], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("environment", "joining"),
    [
        ({}, ""),
        (NODES, "--distributed.coordinator 10.0.0.7:8476 --distributed.processes 2 --distributed.process 1"),
        ({**NODES, "EXTRAS": "tpu,formats,gcs"}, "--distributed.coordinator auto"),
    ],
)
def test_each_node_trains_with_the_others(tmp_path, environment, joining):
    missing = run(tmp_path, **environment)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("STORE is empty")
    result = run(tmp_path, STORE="gs://bucket/a", OVERRIDES="--batch.microbatches 1", **environment)
    stores = "--runs gs://bucket/a/runs --data.cache gs://bucket/a/cache"
    words = f"train config/llama_124m_gpu.yaml {stores} {joining} --batch.microbatches 1"
    assert shlex.split(result.stdout) == words.split()
