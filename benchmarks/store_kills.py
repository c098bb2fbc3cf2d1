"""Kills a process again and again while it saves into an object store, and looks at what is left each time.

    python benchmarks/store_kills.py              # ten kills: a table, exit code 1 if one that counts is damaged
    python benchmarks/store_kills.py --kills 100

The store is moto's, in a process of its own. The process that saves has four devices; of a save about thirty objects
are written by eight threads. Each kill (SIGKILL) comes at a moment drawn between the beginning of a save and the end of
one that takes as long as the last. Then all checkpoints that count are read: every object, by its checksum, and every
number, which follows from the step.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SAVES = """
import sys
import time

from benchmarks.store_kills import made_for
from gregale.services.checkpoint import CheckpointConfig, parts
from gregale.services.checkpoint.store import Checkpoints

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


class Row(NamedTuple):
    """What a kill left; `steps` count, `begun` was being saved, with so many of its objects there."""

    seconds: float
    begun: int
    objects: int
    steps: list[int]
    wrong: str


def made_for(step: int) -> dict:
    """A state that follows from its step, on four devices."""
    import jax
    import numpy as np

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    values = np.arange(100_000, dtype=np.float32)
    return {f"array {n}": jax.device_put(values * (step + n), sharding) for n in range(7)}


def killed(folder, source: random.Random) -> Row:
    """Starts a process that saves, kills it within its third save, and looks at what is there."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    with subprocess.Popen(
        [sys.executable, "-c", SAVES, str(folder)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            begun, took = 0, 1.0
            for number in range(5):  # begins, saved, begins, saved, begins
                word, value = (process.stdout.readline() or "ended 0").split()
                assert word == ("begins", "saved")[number % 2], "the process ended by itself"
                begun, took = (int(value), took) if word == "begins" else (begun, float(value))
            seconds = source.uniform(0, took)
            time.sleep(seconds)
        finally:
            process.send_signal(signal.SIGKILL)
    return looked_at(folder, seconds, begun)


def looked_at(folder, seconds: float, begun: int) -> Row:
    """Reads all checkpoints that count."""
    import numpy as np

    from gregale.services.checkpoint.manifest import MANIFEST, find_damage
    from gregale.services.checkpoint.retention import folder_name
    from gregale.services.checkpoint.store import Checkpoints
    from gregale.storage import files_below

    wrong = []
    with Checkpoints(folder, report=wrong.append) as checkpoints:
        steps = checkpoints.steps()
        if not steps or steps[-1] < begun - 1:
            wrong.append(f"step {begun - 1} was saved, and is gone")
        for step in steps:
            if damage := find_damage(folder / folder_name(step)):
                wrong.append(f"step {step}: {damage}")
                continue
            found = checkpoints.restore(step, made_for(0)).tree
            if any(not np.array_equal(found[name], array) for name, array in made_for(step).items()):
                wrong.append(f"step {step} holds other numbers")
    newest = max(begun, steps[-1] if steps else 0)
    left = [name for name in files_below(folder / folder_name(newest)) if name != MANIFEST]
    return Row(seconds, newest, len(left), steps, "; ".join(wrong))


def main() -> int:
    from tests.stores import BUCKET, CREDENTIALS, s3_server

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    from gregale.storage import place

    source, is_wrong = random.Random(options.seed), False
    print(f"{'kill':>4} {'after s':>8} {'newest begun':>13} {'its objects':>12} {'counts':>7}  all that count")
    with s3_server() as endpoint:
        os.environ.update(CREDENTIALS | {"AWS_ENDPOINT_URL": endpoint})
        folder = place(f"s3://{BUCKET}/checkpoints")
        for kill in range(1, options.kills + 1):
            row = killed(folder, source)
            counts = "yes" if row.begun in row.steps else "no"
            verdict = row.wrong or f"steps {row.steps} are sound"
            print(f"{kill:4} {row.seconds:8.3f} {row.begun:13} {row.objects:12} {counts:>7}  {verdict}", flush=True)
            is_wrong |= bool(row.wrong)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
