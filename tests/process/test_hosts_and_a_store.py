"""Hosts that have nothing in common but a store: one is killed, and the run goes on bit for bit."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from gregale.atomic_files import user_cache
from gregale.checkpoint.manifest import find_damage
from gregale.checkpoint.retention import folder_name
from gregale.distributed.liveness import EXIT_CODE
from gregale.storage import ObjectPath
from tests.forked import Popen
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

HOSTS, STEPS = 2, 32  # each host has one device
SETTINGS = [
    *["--steps", str(STEPS), "--cpu_devices", str(HOSTS), "--checkpoint.every", "4", "--checkpoint.keep_last", "2"],
    # Two numbers have one sum in whatever order; the norm that clips would add up four, which gloo does in its own.
    *["--mesh.replica", "2", "--mesh.data", "1", "--mesh.model", "1", "--optimizer.clip_norm", "null"],
    *["--batch.microbatches", "1", "--data.held_out", "0"],
]


def start_hosts(tmp_path: Path, store: ObjectPath) -> list[subprocess.Popen]:
    """A process for each host, whose home, folder of work, temporary folder and cache of data no other sees."""
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
        command += ["--distributed.process", str(host), "--compilation_cache", str(user_cache())]  # compiled once
        pipe = subprocess.PIPE
        processes.append(Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True))
    return processes


def ends(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each process, when it has ended."""
    try:
        return [finished(process) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_a_run_of_hosts_without_a_shared_disk_goes_on_to_the_last_bit(tmp_path, s3):
    inputs = write_inputs(tmp_path / "inputs")
    code, _, err = finished(start_train(inputs, *SETTINGS))  # one process with all the devices, on a local disk
    assert code == 0, err
    one = inputs / "runs" / "tiny"
    for path in sorted((inputs / "text").iterdir()):
        (s3 / "text" / path.name).write_bytes(path.read_bytes())
    run = s3 / "runs" / "tiny"

    processes = start_hosts(tmp_path, s3)
    while not checkpoint_steps(run) and processes[0].poll() is None:
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGKILL)
    (code, _, err), _ = ends(processes)
    assert code == EXIT_CODE == 75, err
    saved = checkpoint_steps(run)
    lost = rf"process 1 \([\w.-]+, pid {processes[1].pid}\) was lost: its connection closed"
    goes_on = rf"The newest checkpoint is that of step {saved[-1]}; the same command goes on from there"
    assert re.fullmatch(rf"gregale: error: {lost}\. {goes_on}\.\n", err), err
    assert 0 < saved[-1] < STEPS
    assert [find_damage(run / "checkpoints" / folder_name(step)) for step in saved] == [None] * len(saved)

    left = ends(start_hosts(tmp_path, s3))
    assert [(code, err) for code, _, err in left] == [(0, "")] * HOSTS, left
    out = left[0][1]
    assert f"Going on after step {saved[-1]} of {STEPS}." in out
    assert losses(run) == losses(one)
    assert_same_state(run, one, STEPS)
    assert not [path for host in range(HOSTS) for path in (tmp_path / f"host-{host}").rglob("step-*")]
