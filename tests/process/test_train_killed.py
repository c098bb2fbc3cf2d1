"""Kills, SIGTERM and SIGINT, at moments that nobody chose, and runs that go on as if nothing had happened."""

import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs.tiny import assert_same_state, checkpoint_steps, finished, lines, losses, start_train, write_inputs

STEPS = 90
SETTINGS = ["--steps", str(STEPS), "--cpu_devices", "2", "--mesh.data", "1", "--mesh.model", "1", "--checkpoint.every"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def train(inputs) -> Callable[[str], subprocess.Popen]:
    """`train(runs)`: the run in a folder of runs, in a process of its own. All of them run the same programs."""
    return lambda runs: start_train(inputs, *SETTINGS, "2", "--runs", runs)


@pytest.fixture(scope="module")
def undisturbed(train, inputs) -> Path:
    code, _, err = finished(train("undisturbed"))
    assert code == 0, err
    return inputs / "undisturbed" / "tiny"


def traces(run: Path) -> tuple:
    """What can be seen of a run from outside: every line and every folder that comes or goes changes it."""
    folder = run / "checkpoints"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    metrics = run / "metrics.jsonl"
    return (metrics.stat().st_size if metrics.exists() else 0, *names)


def wait_for_changes(process: subprocess.Popen, run: Path, count: int) -> None:
    """Returns as soon as metrics.jsonl has changed once and then anything at all has changed `count` times."""
    before = traces(run)
    while process.poll() is None and traces(run)[0] == before[0]:
        time.sleep(0.001)
    before = traces(run)
    while process.poll() is None and count > 0:
        now = traces(run)
        count -= now != before
        before = now
        time.sleep(0.001)


STOPS = {signal.SIGTERM: 143, signal.SIGINT: 130}
ORDER = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("order", [ORDER[:2], pytest.param(4 * ORDER, marks=pytest.mark.soak)], ids=len)
def test_signals_at_any_moment_change_nothing(train, inputs, undisturbed, order):
    runs = f"disturbed-{len(order)}"
    run, moments, reached = inputs / runs / "tiny", random.Random(0), [0]
    for number in order:
        process = train(runs)
        wait_for_changes(process, run, count=moments.randint(1, 8))
        process.send_signal(number)
        code, out, err = finished(process)
        reached.append(max(checkpoint_steps(run), default=0))
        if number == signal.SIGKILL:
            assert code == -signal.SIGKILL, f"the run ended before it was killed\n{out}\n{err}"
            assert "Traceback" not in err, err
            continue
        assert (code, err) == (STOPS[number], "")
        saved = f"Stopped by {number.name} after step {reached[-1]} and saved; the same command goes on from there."
        assert f"{number.name}: the run ends after its present step or batch, and saves its state." in out
        assert out.splitlines()[-1] == saved
        assert reached[-2] < reached[-1] == losses(run)[-1][0] < STEPS, "it went on, and saved where it stopped"
    code, out, err = finished(train(runs))
    assert code == 0, err
    assert f"Going on after step {reached[-1]} of {STEPS}." in out
    assert reached == sorted(reached), "nothing took a checkpoint back"
    assert 0 < reached[-1] < STEPS
    assert_same_state(run, undisturbed, STEPS)
    assert losses(run) == losses(undisturbed)
    assert [line for line in lines(run) if "eval_loss" in line] == [lines(undisturbed)[-1]]
    assert not [path.name for path in (run / "checkpoints").iterdir() if "." in path.name], "nothing half-done is left"
