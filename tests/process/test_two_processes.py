"""Two real processes: they save, restore, stop and export together, and train nothing if their settings differ."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gregale.checkpoint import CheckpointConfig
from gregale.checkpoint.manifest import MANIFEST
from gregale.checkpoint.store import Checkpoints
from gregale.cli import main
from tests.huggingface.hub import made
from tests.process.two import gregale_in_two, run_two
from tests.programs.tiny import write_inputs


def test_both_write_what_their_devices_have_into_the_same_files(tmp_path):
    pytest.importorskip("transformers")
    made("gemma3", tmp_path / "hub", "20KB", "bfloat16")
    assert main(["import", str(tmp_path / "hub"), str(tmp_path / "mine")]) == 0
    target = tmp_path / "target" / "out"
    flags = "--xla_force_host_platform_device_count=2"
    outputs = gregale_in_two(tmp_path, "export", str(tmp_path / "mine"), str(target), flags=flags)
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    assert "a gemma3_text in bfloat16" in outputs[0][1]
    theirs = {path.name: path.read_bytes() for path in (tmp_path / "hub").glob("*.safetensors*")}
    assert len(theirs) > 3
    assert {path.name: path.read_bytes() for path in target.glob("*.safetensors*")} == theirs
    assert [path.name for path in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("different", "variables", "what"),
    [
        (("--optimizer.learning_rate", "0.02"), {}, r"optimizer\.learning_rate is 0\.01 in {}, but 0\.02 in {}"),
        ((), {"JAX_ENABLE_X64": "1"}, "jax_enable_x64 is false in {}, but true in {}"),
    ],
)
def test_what_has_to_be_equal_is_refused_by_both_before_the_first_step(tmp_path, different, variables, what):
    inputs = write_inputs(tmp_path / "inputs")
    common = ("--cpu_devices", "2", "--mesh.replica", "1", "--mesh.model", "1", "--runs", "refused")
    found = gregale_in_two(inputs, "train", "tiny.yaml", *common, different=different, variables=variables)
    assert [code for code, _, _ in found] == [2, 2], found
    errors = [[line for line in err.splitlines() if "error" in line] for _, _, err in found]
    assert errors[0] == errors[1], "both give the same reason"
    assert not any("Traceback" in err for _, _, err in found)
    names = [rf"process {number} \([\w.-]+, pid \d+\)" for number in range(2)]
    (said,) = errors[0]
    assert re.search(what.format(*names), said), said
    assert not (inputs / "refused").exists(), "nothing was begun"


VALUES = np.arange(8 * 1024, dtype=np.float32).reshape(8, 1024)

WORKER = """
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from gregale.errors import Busy, UserError
from gregale.checkpoint import CheckpointConfig
from gregale.checkpoint.multihost import by_first_process
from gregale.checkpoint.store import Checkpoints
from gregale.distributed.signals import Cut, StopRequest
from gregale.programs.train.loop import Steps
from gregale.runs.process_agreement import agree_on_text

directory = Path(sys.argv[3])
devices = np.asarray(jax.devices())
assert devices.size == 4 and jax.process_count() == 2
values = np.arange(8 * 1024, dtype=np.float32).reshape(8, 1024)


def placed(array, mesh, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def state(step, mesh, *spec):
    return {"x": placed(values * step, mesh, *spec), "step": placed(np.int32(step), mesh)}


def check(found, step):
    for shard in found["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, (values * step)[shard.index])
    assert int(found["step"].addressable_data(0)) == step


rows = Mesh(devices.reshape(2, 2), ("a", "b"))
other = Mesh(devices[::-1].reshape(4, 1), ("a", "b"))
reports = []
with Checkpoints(directory, CheckpointConfig(keep_last=2), reports.append) as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(step, state(step, rows, ("a", "b")), {"step": step})
    restored = checkpoints.latest(state(0, other, "b", "a"))
    check(restored.tree, 3)
    assert restored.metadata == {"step": 3}
    assert checkpoints.steps() == [2, 3]

    # A damaged file that only process 1 looks at: both must use the one before it, and process 0 says so.
    by_first_process(lambda: None, None)  # process 0 has read it
    if rank == 1:
        files = json.loads((directory / "step-00000003" / "manifest.json").read_text())["files"]
        damaged = directory / "step-00000003" / sorted(files)[1]
        damaged.write_bytes(damaged.read_bytes()[:-1])
    restored = checkpoints.latest(state(0, rows, None, ("b", "a")))
    assert restored.step == 2
    check(restored.tree, 2)
    assert sum("damaged" in report for report in reports) == (1 if rank == 0 else 0), reports

    # It is saved again, in the damaged one's place.
    checkpoints.save(3, state(30, rows, "a", "b"), {"step": 30})
    restored = checkpoints.restore(3, state(0, rows))
    check(restored.tree, 30)


def refuse():
    raise Busy("another process trains the run")


# An error that ends both processes: process 0 explains it, and both have the same exit code.
try:
    by_first_process(refuse, None)
except UserError as error:
    refused = error
expected = "another process trains the run" if rank == 0 else "process 0 ended the run and gave the reason."
assert (str(refused), refused.exit_code) == (expected, 75)

# A signal that reaches one process stops both at the same step.
with StopRequest(check_every=3) as stop:
    for step in range(1, 40):
        if rank == 1 and step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        if stop.agreed(step):
            break

# It also leaves an evaluation in both after the same batch.
with StopRequest() as stopped:
    for batch in range(1, 40):
        if rank == 1 and batch == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            stopped.check()
        except Cut:
            assert stopped.agreed(step + 1), "and no further step is made"
            break

# A callback of one process ends the run in both, at the same step and with the same reason.
loop = SimpleNamespace(stop=StopRequest(check_every=2), step=0, stop_reason=None)
while not Steps.is_stopped(loop):
    loop.step += 1
    if rank == 1 and loop.step == 3:
        loop.stop.ask("the loss  falls no more.")
print(loop.step, loop.stop_reason)

# Text that differs is refused by both, with the same reason.
store = SimpleNamespace(tokens=range(1000 + rank), manifest={"files": rank})
corpus = SimpleNamespace(stores={"sources.words": store}, tokenizer=SimpleNamespace(fingerprint=""), fingerprint=rank)
try:
    agree_on_text(corpus, ())
except UserError as error:
    print(error)
print("done", rank, step, stop.signal_name, batch)
"""


def test_one_process_restores_what_both_processes_wrote(tmp_path):
    directory = tmp_path / "checkpoints"
    outputs = run_two(WORKER, str(directory))
    assert [output.splitlines()[-1] for output in outputs] == ["done 0 12 None 12", "done 1 12 SIGTERM 12"]
    assert [output.splitlines()[-3] for output in outputs] == ["6 the loss falls no more"] * 2
    refused, name = {output.splitlines()[-2] for output in outputs}.pop(), r"process {} \([\w.-]+, pid \d+\)"
    assert all(output.splitlines()[-2] == refused for output in outputs)
    tokens = rf"1,000 tokens \(\w+\) in {name.format(0)}, but 1,001 tokens \(\w+\) in {name.format(1)}"
    assert re.match(rf"data\.sources\.words is {tokens}", refused), refused
    with Checkpoints(directory, CheckpointConfig()) as checkpoints:
        mesh = jax.make_mesh((8,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "all"))
        template = {"x": jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=sharding), "step": jnp.int32(0)}
        restored = checkpoints.latest(template)
    np.testing.assert_array_equal(restored.tree["x"], VALUES * 30)
    assert (restored.step, int(restored.tree["step"])) == (3, 30)
    folder = directory / "step-00000003"
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {name.split("/")[1] for name in there if "-" in name} == {"00000-00000", "00001-00000"}
    assert set(json.loads((folder / MANIFEST).read_bytes())["files"]) == there - {MANIFEST}
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000002", "step-00000003"]
