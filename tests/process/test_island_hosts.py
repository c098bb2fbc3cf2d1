"""An island of two processes is one island: it computes what one process with as many devices does, and dies whole."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gregale.distributed.liveness import EXIT_CODE
from gregale.islands import state
from tests.fleet import Fleet, Island, Seconds
from tests.ports import free_port
from tests.programs.tiny import FAST_TO_COMPILE, write_config, write_inputs

PATIENCE_SECONDS = 300.0
STEPS, ROUNDS = 4, 5  # a round after each step, and one of the other fragment after the last
LOCKSTEP = ("--islands.lockstep", "true")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[Fleet]:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    write_config(
        folder,
        cpu_devices=4,
        mesh={"data": 4},
        batch={"size": 8, "sequence_length": 32},
        sync={"type": "streaming_diloco", "period": 2, "fragments": 2, "delay": 1, "alpha": 0.5},
        model__layers=2,
        steps=STEPS,
        checkpoint={"every": 1000},
        data__held_out=0.0,
        optimizer={"type": "adamw", "learning_rate": 0.001, "schedule": {"type": "constant"}},
        stages=[{"from": 2, "batch": {"sequence_length": 64}, "mesh": {"data": 2, "context": 2}}],
    )
    with Fleet(folder, "tiny.yaml", Seconds(5.0, 60.0), environment={"XLA_FLAGS": FAST_TO_COMPILE}) as fleet:
        yield fleet


def start(fleet: Fleet, name: str, processes: int, *options: str) -> list[Island]:
    """Start the processes of an island."""
    if processes > 1:
        options += ("--distributed.coordinator", f"127.0.0.1:{free_port()}", "--distributed.processes", str(processes))
        options += ("--distributed.timeout_seconds", "20")
    number = "--distributed.process"
    return [fleet.start(name, *options, number, str(k), log=f"{name}-{k}") for k in range(processes)]


def outer_arrays(run: Path) -> dict[str, np.ndarray]:
    """Every array of the outer state after the last round, of all hosts; what two of them have is the same."""
    found: dict[str, np.ndarray] = {}
    for folder in sorted(run.glob("outer*")):
        for name, array in state.read_outer(folder, ROUNDS).arrays.items():
            if name in found:
                np.testing.assert_array_equal(array, found[name], err_msg=name)
            found[name] = array
    return found


def test_two_processes_compute_what_one_does(fleet):
    for processes, name in enumerate(("one", "two"), 1):
        island = start(fleet, name, processes, *LOCKSTEP)
        assert [each.process.wait(PATIENCE_SECONDS) for each in island] == [0] * processes, fleet.tails()
    one, two = (fleet.folder / "runs" / name for name in ("one", "two"))
    assert {path.name for path in two.glob("outer*")} == {"outer", "outer-1"}
    found, expected = outer_arrays(two), outer_arrays(one)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert [each.round for each in fleet.observe() if each.island == "two"] == list(range(1, ROUNDS + 1))


@pytest.mark.soak  # `test_hosts` has its parts, and `test_hosts_and_a_store` shows how a process of a run is lost
def test_it_goes_on_from_its_checkpoint_and_dies_whole(fleet):
    island = start(fleet, "again", 2, *LOCKSTEP)
    assert [each.process.wait(PATIENCE_SECONDS) for each in island] == [0, 0], fleet.tails()
    first, second = start(fleet, "again", 2, *LOCKSTEP, "--steps", "2000")
    fleet.wait(lambda: fleet.newest("again") >= ROUNDS + 2, PATIENCE_SECONDS, "rounds after the checkpoint")
    second.kill()
    assert first.process.wait(PATIENCE_SECONDS) == EXIT_CODE, first.said()
    assert "was lost: its connection closed" in first.said()
