"""Hosts that have nothing in common but a store train what one process does: one is killed, and the run goes on."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gregale.atomic_files import user_cache
from gregale.checkpoint.manifest import find_damage, folder_name
from gregale.distributed.liveness import EXIT_CODE
from gregale.storage import ObjectPath, names
from tests.forked import Popen
from tests.ports import free_port
from tests.process.two import all_finished
from tests.programs.tiny import (
    FAST_TO_COMPILE,
    assert_same_state,
    checkpoint_steps,
    finished,
    lines,
    losses,
    start_train,
    write_config,
    write_inputs,
)

HOSTS, STEPS = 2, 32  # each host has one of DiLoCo's replicas, on two devices
SETTINGS = [
    *["--steps", str(STEPS), "--cpu_devices", "4", "--checkpoint.every", "4", "--checkpoint.keep_last", "2"],
    # Two numbers have one sum in whatever order; the norm that clips would add up four, which gloo does in its own.
    *["--mesh.replica", "2", "--mesh.data", "2", "--mesh.model", "1", "--optimizer.clip_norm", "null"],
    *["--batch.microbatches", "1", "--sync.type", "diloco", "--sync.period", "4", "--evaluation.every", "16"],
    *["--evaluation.batches", "2", "--samples.prompts", "[the wind]", "--samples.tokens", "8"],
    *["--samples.temperature", "0"],
]
FIGURES = {"eval_loss", "bits_per_byte", "loss_spread", "grad_norm", "outer_grad_norm", "outer_grad_cosine"}
# Gloo tells of its connections on standard output; its threads write in pieces that fall between one another.
WRITTEN = ("config.yaml", "metrics.jsonl", "samples.txt", "checkpoints", "newest_checkpoint.json", "starts.jsonl")
GLOO = re.compile(
    r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : |\d|\s"
)


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
    (code, _, err), _ = all_finished(processes)
    assert code == EXIT_CODE == 75, err
    saved = checkpoint_steps(run)
    lost = rf"process 1 \([\w.-]+, pid {processes[1].pid}\) was lost: its connection closed"
    goes_on = rf"The newest checkpoint is that of step {saved[-1]}; the same command goes on from there"
    assert re.fullmatch(rf"gregale: error: {lost}\. {goes_on}\.\n", err), err
    assert 0 < saved[-1] < STEPS
    assert [find_damage(run / "checkpoints" / folder_name(step)) for step in saved] == [None] * len(saved)

    left = all_finished(start_hosts(tmp_path, s3))
    assert [(code, err) for code, _, err in left] == [(0, "")] * HOSTS, left
    out = left[0][1]
    assert f"Going on after step {saved[-1]} of {STEPS}." in out
    assert GLOO.sub("", left[1][1]) == "", "only the first process writes"
    assert losses(run) == losses(one)
    assert_same_state(run, one, STEPS)
    assert {path.name for path in one.iterdir()} == {*WRITTEN, "tokenizer.json"}
    assert set(names(run)) == {*WRITTEN, "tokenizer.json", "changes.jsonl"}, "the coordinator's port is another"
    assert [line["step"] for line in lines(run) if "eval_loss" in line] == [16, 32]
    for mine, expected in zip(lines(run), lines(one), strict=True):
        assert mine.keys() == expected.keys()
        for key in FIGURES & mine.keys():
            assert mine[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
    assert (run / "samples.txt").read_text() == (one / "samples.txt").read_text()
    assert not [path for host in range(HOSTS) for path in (tmp_path / f"host-{host}").rglob("step-*")]
