"""Kills, SIGTERM and SIGINT, at moments that nobody chose: runs go on as if nothing had happened, and stores are sound.

A process that saves into an object store is killed again and again: it has four devices, and of a save about thirty
objects are written by eight threads. Each kill (SIGKILL) comes at a moment drawn between the beginning of a save and
the end of one that takes as long as the last. Then all checkpoints that count are read: every object, by its checksum,
and every number, which follows from the step.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from gregale.checkpoint.manifest import find_damage, folder_name
from gregale.checkpoint.store import Checkpoints
from gregale.storage import ObjectPath
from tests.forked import Popen
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


ROOT = Path(__file__).resolve().parents[2]

SAVES = """
import sys
import time

from tests.process.test_train_killed import made_for
from gregale.checkpoint import CheckpointConfig, files as parts
from gregale.checkpoint.store import Checkpoints

parts.PART_BYTES = 100_000
with Checkpoints(sys.argv[1], CheckpointConfig(keep_last=2), report=lambda _: None) as checkpoints:
    restored = checkpoints.latest(made_for(0))
    step = 1 if restored is None else restored.step + 1
    while True:
        tree, began = made_for(step), time.monotonic()
        print("begins", step, flush=True)
        checkpoints.save(step, tree, {"step": step})
        checkpoints.wait()
        assert checkpoints.failure is None, checkpoints.failure
        print("saved", time.monotonic() - began, flush=True)
        step += 1
"""


def made_for(step: int) -> dict:
    """A state that follows from its step, on four devices."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    values = np.arange(100_000, dtype=np.float32)
    return {f"array {n}": jax.device_put(values * (step + n), sharding) for n in range(7)}


def kill_within_a_save(folder: ObjectPath, source: random.Random) -> int:
    """Start a process that saves, kill it within its third save, and return the step of that save."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    with Popen(
        [sys.executable, "-c", SAVES, str(folder)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            begun, took = 0, 1.0
            for number in range(5):  # begins, saved, begins, saved, begins
                word, value = (process.stdout.readline() or "ended 0").split()
                assert word == ("begins", "saved")[number % 2], "the process ended by itself"
                begun, took = (int(value), took) if word == "begins" else (begun, float(value))
            time.sleep(source.uniform(0, took))
        finally:
            process.send_signal(signal.SIGKILL)
    return begun


def look_at(folder: ObjectPath, begun: int) -> None:
    """Read all checkpoints that count."""
    reports: list[str] = []
    with Checkpoints(folder, report=reports.append) as checkpoints:
        steps = checkpoints.steps()
        assert len(steps) >= 2
        assert steps[-1] >= begun - 1, f"step {begun - 1} was saved, and is gone"
        for step in steps:
            assert find_damage(folder / folder_name(step)) is None
            found = checkpoints.restore(step, made_for(0)).tree
            assert all(np.array_equal(found[name], array) for name, array in made_for(step).items()), step
    assert reports == []


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_what_counts_after_a_kill_is_sound(s3, kills):
    source = random.Random(1)
    for _ in range(kills):
        look_at(s3 / "checkpoints", kill_within_a_save(s3 / "checkpoints", source))
