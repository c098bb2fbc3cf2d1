"""A process is killed again and again while it saves into an object store: what is left each time is sound.

The process that saves has four devices; of a save about thirty objects are written by eight threads. Each kill
(SIGKILL) comes at a moment drawn between the beginning of a save and the end of one that takes as long as the last.
Then all checkpoints that count are read: every object, by its checksum, and every number, which follows from the step.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from gregale.checkpoint.manifest import find_damage, folder_name
from gregale.checkpoint.store import Checkpoints
from gregale.storage import ObjectPath
from tests.forked import Popen

ROOT = Path(__file__).resolve().parents[2]

SAVES = """
import sys
import time

from tests.process.test_store_kills import made_for
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
