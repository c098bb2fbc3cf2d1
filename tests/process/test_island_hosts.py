"""An island of two processes is one island: it computes what one process with as many devices does, and dies whole."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from gregale.distributed.liveness import EXIT_CODE
from gregale.islands import outer_checkpoint
from tests.forked import Popen
from tests.ports import free_port
from tests.programs.tiny import FAST_TO_COMPILE, finished, write_config, write_inputs

SECONDS = ["--islands.reduce_seconds", "60", "--islands.heartbeat_seconds", "5"]
ROUNDS = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    write_config(
        folder,
        cpu_devices=4,
        mesh={"data": 4},
        batch={"size": 8, "sequence_length": 32},
        sync={"type": "streaming_diloco", "period": 2, "fragments": 2, "delay": 1, "alpha": 0.5},
        model__layers=2,
        steps=ROUNDS,
        checkpoint={"every": 1000},
        data__held_out=0.0,
        optimizer={"type": "adamw", "learning_rate": 0.001, "schedule": {"type": "constant"}},
    )
    token = folder / "token"
    token.write_text("a secret of the whole fleet")
    token.chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def lighthouse(inputs) -> Iterator[str]:
    """The address of a coordinator."""
    command = ["lighthouse", "--bind", "127.0.0.1:0", "--heartbeat_seconds", "5"]
    command += ["--token_file", str(inputs / "token")]
    process = Popen([sys.executable, "-m", "gregale", *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().split("listens at ")[1].split(". ")[0]
    process.kill()
    process.communicate()


def start_island(inputs: Path, lighthouse: str, name: str, processes: int, *arguments: str) -> list[subprocess.Popen]:
    """The processes of an island."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_TO_COMPILE}
    fleet = ["--islands.lighthouse", lighthouse, "--islands.token_file", str(inputs / "token"), *SECONDS]
    command = [sys.executable, "-m", "gregale", "island", "tiny.yaml", "--runs", "runs", "--name", name]
    command += ["--islands.name", name, *fleet, *arguments]
    if processes > 1:
        command += ["--distributed.coordinator", f"127.0.0.1:{free_port()}", "--distributed.processes", str(processes)]
    return [
        Popen(
            [*command, "--distributed.process", str(process)],
            cwd=inputs,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]


def rounds(run: Path) -> list[dict]:
    path = run / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def outer_arrays(run: Path) -> dict[str, np.ndarray]:
    """Every array of the outer side after the last round, of all hosts; what two of them have is the same."""
    found: dict[str, np.ndarray] = {}
    for folder in sorted(run.glob("outer*")):
        for name, array in outer_checkpoint.read(folder, ROUNDS).arrays.items():
            if name in found:
                np.testing.assert_array_equal(array, found[name], err_msg=name)
            found[name] = array
    return found


@contextmanager
def island(inputs: Path, lighthouse: str, name: str, processes: int, *arguments: str) -> Iterator[list]:
    """The processes of an island, killed at the end."""
    started = start_island(inputs, lighthouse, name, processes, *arguments)
    try:
        yield started
    finally:
        for process in started:
            process.kill()


def test_two_processes_compute_what_one_does_and_end_together(inputs, lighthouse):
    runs = [inputs / "runs" / name for name in ("one", "two")]
    for processes, run in enumerate(runs, 1):
        with island(inputs, lighthouse, run.name, processes, "--islands.lockstep", "true") as started:
            left = [finished(process) for process in started]
            assert [code for code, _, _ in left] == [0] * processes, left
    one, two = runs
    assert {path.name for path in two.glob("outer*")} == {"outer", "outer-1"}
    found, expected = outer_arrays(two), outer_arrays(one)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert [line["round"] for line in rounds(two)] == list(range(1, ROUNDS + 1))
    more = ["--islands.lockstep", "true", "--steps", "2000", "--distributed.timeout_seconds", "20"]
    with island(inputs, lighthouse, "two", 2, *more) as started:
        wait_until(lambda: len(rounds(two)) >= ROUNDS + 2, "rounds after the checkpoint")
        started[1].kill()
        code, _, err = finished(started[0])
        assert code == EXIT_CODE, err
        assert "was lost: its connection closed" in err


@pytest.mark.soak
def test_a_killed_process_ends_its_island_and_the_other_goes_on(inputs, lighthouse):
    several = ["--islands.min_members_to_start", "2", "--steps", "2000", "--distributed.timeout_seconds", "20"]
    doomed, other = (inputs / "runs" / name for name in ("doomed", "other"))
    with ExitStack() as stack:
        islands = {
            run.name: stack.enter_context(island(inputs, lighthouse, run.name, 2, *several)) for run in (doomed, other)
        }
        wait_until(lambda: len(rounds(other)) >= 3 and len(rounds(doomed)) >= 3, "rounds of both")
        islands["doomed"][1].kill()
        code, _, err = finished(islands["doomed"][0])
        assert code == EXIT_CODE, err
        assert "was lost: its connection closed" in err
        before = len(rounds(other))
        wait_until(lambda: len(rounds(other)) >= before + 3, "rounds of the survivor alone")
        assert rounds(other)[-1]["members"] == ["other"]
        ours, theirs = ({line["round"]: line for line in rounds(run)} for run in (doomed, other))
        common = [number for number in ours if len(theirs[number]["members"]) == 2]
        assert [ours[number]["digest"] for number in common] == [theirs[number]["digest"] for number in common]
        assert len(common) >= 3
        assert any(ours[number]["bytes_sent"] for number in common)
        islands["other"][1].send_signal(signal.SIGTERM)
        left = [finished(process) for process in islands["other"]]
        assert [code for code, _, _ in left] == [128 + signal.SIGTERM] * 2, left


def wait_until(condition, what: str, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} did not come within {seconds:g} s"
        time.sleep(0.2)
