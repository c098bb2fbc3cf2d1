"""Four processes that have nothing in common but a store, each with directories of its own; one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gregale.storage import Remote
from tests.ports import free_port
from tests.programs.tiny import (
    FAST_TO_COMPILE,
    assert_same_state,
    checkpoint_steps,
    finished,
    losses,
    start_train,
    write_config,
    write_inputs,
)

HOSTS, STEPS = 4, 32
SETTINGS = [
    *["--steps", str(STEPS), "--cpu_devices", str(HOSTS), "--checkpoint.every", "4", "--checkpoint.keep_last", "2"],
    # Two numbers have one sum in whatever order; the norm that clips would add up four, which gloo does in its own.
    *["--mesh.replica", "2", "--mesh.data", "2", "--mesh.model", "1", "--optimizer.clip_norm", "null"],
    *["--batch.microbatches", "1"],
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def one(inputs) -> Path:
    """The run of one process with all the devices, on a local disk."""
    code, _, err = finished(start_train(inputs, *SETTINGS))
    assert code == 0, err
    return inputs / "runs" / "tiny"


def start_hosts(tmp_path: Path, store: Remote) -> list[subprocess.Popen]:
    """A process for each host, whose home, folder of work, temporary folder and caches no other sees."""
    port, processes = free_port(), []
    for host in range(HOSTS):
        folder = tmp_path / f"host-{host}"
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        write_config(folder)
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_TO_COMPILE, "HOME": str(folder)}
        environment |= {"TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache")}
        command = [sys.executable, "-m", "gregale", "train", "tiny.yaml", *SETTINGS, "--runs", f"{store}/runs"]
        command += ["--data.sources.words.files", f"[{store}/text/*.txt]", "--data.cache", f"{store}/cache"]
        command += ["--distributed.coordinator", f"127.0.0.1:{port}", "--distributed.processes", str(HOSTS)]
        command += ["--distributed.process", str(host), "--distributed.timeout_seconds", "20"]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True))
    return processes


def test_hosts_without_a_shared_disk_go_on_to_the_last_bit(tmp_path, inputs, one, s3):
    for path in sorted((inputs / "text").iterdir()):
        (s3 / "text" / path.name).write_bytes(path.read_bytes())
    run = s3 / "runs" / "tiny"
    processes = start_hosts(tmp_path, s3)
    try:
        while not checkpoint_steps(run) and processes[0].poll() is None:
            time.sleep(0.02)
        processes[2].send_signal(signal.SIGKILL)
        ends = [finished(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [code for code, _, _ in ends] == [75, 75, -signal.SIGKILL, 75], ends
    assert all(
        "was lost: its connection closed. The newest checkpoint is that of step" in ends[i][2] for i in (0, 1, 3)
    )
    assert 0 < checkpoint_steps(run)[-1] < STEPS
    processes = start_hosts(tmp_path, s3)
    try:
        ends = [finished(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [code for code, _, _ in ends] == [0] * HOSTS, ends
    assert [err for _, _, err in ends] == [""] * HOSTS
    assert "Going on after step" in ends[0][1]
    assert losses(run) == losses(one)
    assert_same_state(run, one, STEPS)
    assert not [path for host in range(HOSTS) for path in (tmp_path / f"host-{host}").rglob("step-*")]
