"""Between the steps of an island: its batches, its turns to save, its checkpoints and its rounds.jsonl."""

import json
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.checkpoint.files import not_finite
from gregale.checkpoint.store import Checkpoints
from gregale.distributed.liveness import Phase, Progress, ThreadProgress
from gregale.distributed.signals import StopRequest
from gregale.islands.hosts import OuterSnapshot
from gregale.islands.outer import HostOuter
from gregale.islands.protocol.messages import seed
from gregale.islands.run import CheckpointStagger, IslandSaving, rounds_of
from gregale.islands.steps import IslandResources, IslandSteps, LeasedBatches, without_nonfinite
from gregale.islands.trainer_command import ApplyRound, Finish, LoadOuterState, RoundPacing, SendMessage
from gregale.methods.method import StepMetrics
from gregale.methods.schedule import Schedule
from gregale.programs.runtime.batches import BatchSharding
from gregale.programs.train.loop import NextPrograms
from gregale.programs.train.resume import Start
from gregale.programs.train.step_log import Observers
from gregale.runs.history import RunPaths
from gregale.storage import StoreError, write_bytes
from gregale.storage.jsonl import ResumePoint, lines_at, read_entries
from gregale.tracking.callback import Callbacks, StepContext
from gregale.training.state import StepReport
from tests.mesh.support import layout_of
from tests.methods.islands import Fleet, on_one_device
from tests.stores import Fault, proxied

SCHEDULE = Schedule(period=10, fragments=2, delay=1, layers=4)  # a round every 5 steps
ROUNDS = RunPaths.rounds
PACE = RoundPacing(SCHEDULE, 120, False, 1.0)


class Counting:
    """Example i is the row [i, i + 1000, i + 2000, i + 3000]."""

    def batch(self, first: int, size: int, rows: list[int]) -> dict[str, np.ndarray]:
        del size
        return {"tokens": np.stack([np.arange(4, dtype=np.int32) * 1000 + first + row for row in rows])}


def test_batches_follow_the_leases():
    firsts = [0, 4, 100]
    placement = BatchSharding((Axis("batch", 4), Axis("position", 4)), layout_of(context=2, data=2))
    with closing(LeasedBatches(Counting(), placement, lambda: firsts.pop(0) if firsts else None)) as batches:
        seen = [np.asarray(next(batches)["tokens"].array)[:, 0].tolist() for _ in range(3)]
        assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [100, 101, 102, 103]]
        assert next(batches, None) is None
        firsts.append(8)  # a committed round has leased more
        assert np.asarray(next(batches)["tokens"].array)[0].tolist() == [8, 3008, 1008, 2008], "as devices hold it"


def test_no_round_of_a_checkpoint_is_forgotten_while_the_store_does_not_tell(s3, s3_endpoint, monkeypatch):
    with Checkpoints(s3 / "checkpoints", report=lambda _: None) as checkpoints:
        for step, metadata in ((10, {"islands": {"round": 4}}), (20, {})):
            checkpoints.save(step, {"x": jnp.zeros(1)}, metadata)
        checkpoints.wait()
        assert rounds_of(checkpoints) == {4}
    with proxied(s3_endpoint) as (endpoint, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        proxy.faults[:] = [Fault("denied", 1000, "GET", "metadata.json")]
        with Checkpoints(s3 / "checkpoints") as checkpoints, pytest.raises(StoreError):
            rounds_of(checkpoints)


def resources(run, last: int) -> IslandResources:
    controller: Any = SimpleNamespace(close=lambda: None)
    nothing: Any = None
    return IslandResources(
        nothing, nothing, controller, run, [], lines_at(run / ROUNDS, ResumePoint("round", last), print)
    )


@pytest.mark.parametrize("place", ["tmp_path", "s3"])
def test_rounds_after_the_checkpoint_go_and_others_follow(request, place):
    def numbers() -> list[int]:
        return [each["round"] for each in read_entries(run / ROUNDS, number="round").entries]

    run = request.getfixturevalue(place)
    lines = b"".join(json.dumps({"round": number}).encode() + b"\n" for number in range(1, 6))
    write_bytes(run / ROUNDS, lines + b'{"round": 2, "be')
    island = resources(run, 3)
    island.rounds.add({"round": 4, "members": ["a", "b"], "healed": False})
    island.flush()
    assert numbers() == [1, 2, 3, 4]
    island.rounds.add({"round": 5})
    island.close(print)
    assert numbers() == [1, 2, 3, 4, 5]


def test_an_island_ends_as_ever_when_the_store_takes_no_more(s3, s3_endpoint, monkeypatch):
    with proxied(s3_endpoint) as (endpoint, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        said: list[str] = []
        island = resources(s3, 0)
        island.rounds.add({"round": 1})
        proxy.faults[:] = [Fault("expired", 100, "PUT")]
        island.close(said.append)
        assert len(said) == 1
        assert said[0].startswith(f"{s3}/{ROUNDS} lacks its last 1 lines. {s3}/{ROUNDS}: the store refused access (Exp")


def saved(turns: CheckpointStagger, place: float, rounds: range) -> list[int]:
    """The steps of the schedule after which a checkpoint is written; every round is asked about at three steps."""
    asked = [number for number in rounds for _ in range(3)]
    return [SCHEDULE.round_step(number) for number in asked if turns.is_due(number, place)]


@pytest.mark.parametrize(
    ("place", "rounds", "steps"),
    [
        (0.0, range(24), [40, 80, 120]),
        (0.25, range(24), [10, 50, 90]),
        (0.5, range(12, 20), [100]),  # the first after a restart, after step 65
    ],
)
def test_each_island_saves_at_its_place(place, rounds, steps):
    assert saved(CheckpointStagger(40, PACE), place, rounds) == steps


def test_a_missed_or_moved_turn_is_late_and_taken_once():
    turns = CheckpointStagger(40, PACE)
    assert saved(turns, 0.0, range(3)) == []
    assert saved(turns, 0.0, range(9, 20)) == [50, 80]
    moved = CheckpointStagger(40, PACE)
    assert saved(moved, 0.0, range(9)) == [40]
    assert saved(moved, 0.75, range(9, 24)) == [110]
    for every, arrived in ((None, 7), (40, None)):
        assert not CheckpointStagger(every, PACE).is_due(arrived, 0.0)


class Controller:
    """Gives the commands `orders`.

    - `asked`: after how many steps the outer parameters were asked for
    - `waits`: the progress of the main thread while it waits for a command
    """

    pace = SimpleNamespace(schedule=SCHEDULE)

    def __init__(self, outer: HostOuter):
        self.side, self.is_early = OuterSnapshot(seed(""), outer.now()), False
        self.orders, self.asked, self._steps = [], [], 0
        self.progress, self.waits = Progress(), []

    def order(self, starved: bool) -> Any:
        del starved
        self.waits.append(self.progress.current)
        return self.orders.pop(0) if self.orders else None

    def stepped(self) -> None:
        self._steps += 1

    def diverged(self) -> bool:
        self.asked.append(self._steps)
        return True

    def message_sent(self, number: int, down: Callable[[], Any], used: int) -> None:
        self.sent = number, down, used

    def used(self, batches: int) -> int:
        return batches

    def take(self) -> None: ...

    def leave(self) -> None:
        self.orders.append(Finish(complete=False))

    def to_save(self, batches: int) -> dict[str, Any]:
        return {"used": batches}


@pytest.fixture
def island_steps() -> Callable[[list[int]], tuple[IslandSteps, Controller]]:
    """`island_steps(counts)`: steps of 8 tokens that report these numbers of skipped steps in a row."""

    def make(counts: list[int]) -> tuple[IslandSteps, Controller]:
        (member,) = Fleet.of([on_one_device(Schedule(3))]).members
        island, controller, left = member.island, Controller(member.host), iter(counts)

        def take(state: Any, batch: Any, step: int) -> tuple[Any, StepReport]:
            del batch, step
            metrics = StepMetrics(jnp.float32(0), jnp.float32(8), jnp.float32(0), jnp.array(True))
            return state, StepReport(metrics, jnp.int32(0), jnp.int32(next(left)))

        axes = Axis("batch", 4), Axis("position", 4)
        setup: Any = SimpleNamespace(method=island, batch_axes=axes, layout=island.layout)
        stage = {"stage_at": lambda round: int(round >= 5), "stage": 0, "firsts": ()}
        bases = {0: member.host.now().part(0)}
        given = {"step": take, "outer": member.host, "controller": controller, "seen": [0.0], "bases": bases}
        resources: Any = SimpleNamespace(**given, **stage)
        nothing: Any = None
        observers = Observers(Callbacks([]), nothing, controller.progress)
        return IslandSteps(setup, resources, nothing, Start(member.state, 0, 0, 0), nothing, observers), controller

    return make


def broken(state: Any) -> Any:
    """The state with NaN in all parameters."""
    psdp = state.method.psdp
    parameters = jax.tree.map(lambda array: array * jnp.nan, psdp.parameters)
    return state._replace(method=state.method._replace(psdp=psdp._replace(parameters=parameters)))


@pytest.mark.parametrize(
    ("counts", "is_broken", "asked"),
    [([0, 1, 0, 1, 0], False, []), ([0, 1, 2, 0], False, [4]), ([0, 1, 2, 0], True, [3, 4]), ([0, 0, 0], True, [])],
    ids=["single ones", "two in a row", "of NaN", "not skipped"],
)
def test_an_island_asks_for_the_outer_parameters_once_its_own_are_of_no_use(island_steps, counts, is_broken, asked):
    """One step after the report, so that a step is always queued."""
    steps, controller = island_steps(counts)
    steps.state = broken(steps.state) if is_broken else steps.state
    for _ in counts:
        steps.take({})
    assert controller.asked == asked


def test_an_island_that_hands_messages_over_early_waits_for_each_step(island_steps):
    """Its message then is on the host before the next step ends."""
    steps, controller = island_steps([0, 2])
    controller.is_early = True
    steps.take({})
    steps.take({})
    assert controller.asked == [2], "the report of the newest step was read"


def test_a_message_weighs_less_for_each_round_that_passed_without_its_steps(island_steps):
    steps, controller = island_steps([0])
    steps.take({})
    controller.orders = [ApplyRound(0, 0.0), ApplyRound(1, 0.0), SendMessage(2)]
    steps.between()
    number, down, _ = controller.sent
    assert (number, down().weight) == (2, pytest.approx(8 / 3))


def test_a_state_that_is_replaced_loses_its_reports_and_its_tokens_once(island_steps):
    steps, controller = island_steps([0, 2, 0, 0])
    steps.take({})
    controller.orders = [SendMessage(0)]
    steps.between()
    steps.state = broken(steps.state)
    steps.take({})
    controller.orders = [LoadOuterState(0), ApplyRound(0, 8.0)]  # the message from before is part of the round
    steps.between()
    assert not not_finite(steps.state.method)
    steps.take({})
    assert controller.asked == [], "the skipped step was that of the earlier state"
    assert steps.seen() == [8.0]


def test_an_island_that_a_callback_ends_leaves_complete_with_the_outer_parameters(island_steps):
    steps, _ = island_steps([])
    steps.state, steps.stop = broken(steps.state), StopRequest()
    steps.stop.ask("enough")
    assert steps.next_batch() is None
    assert (steps.ended, steps.complete, steps.stop_reason) == (True, True, "enough")
    assert not not_finite(steps.state.method)


def test_steps_end_with_the_round_after_which_the_fleet_is_in_another_stage(island_steps):
    """The commands after that are of the next stage, whose programs are compiled after the first step of this one."""
    steps, controller = island_steps([0])
    compiled: list[int] = []
    steps._next = NextPrograms([lambda: compiled.append(steps.batches)])
    steps.take({})
    controller.orders = [ApplyRound(3, 0.0), ApplyRound(4, 0.0), SendMessage(5)]
    steps.between()
    assert (steps.arrived, steps.ended_stage, steps.ended, controller.orders) == (4, True, False, [SendMessage(5)])
    assert steps.next_batch() is None
    assert compiled == [1]


def test_only_the_wait_for_a_command_has_no_time_limit(island_steps):
    steps, controller = island_steps([])
    controller.progress.at(7, Phase.TRAINING)
    steps.between()
    assert controller.waits == [ThreadProgress(7, Phase.SYNCHRONISING, True, 1)]
    assert controller.progress.current == ThreadProgress(7, Phase.TRAINING, False, 2)


@pytest.mark.parametrize(("is_broken", "has_peers", "saves"), [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_no_checkpoint_is_tried_of_a_state_that_peers_replace(island_steps, monkeypatch, is_broken, has_peers, saves):
    steps, controller = island_steps([])
    monkeypatch.setattr(controller, "diverged", lambda: has_peers)
    saved = []
    monkeypatch.setattr(IslandSaving, "_save", lambda _, pause, *__: saved.append(pause.step))
    setup: Any = SimpleNamespace(config=SimpleNamespace(checkpoint=SimpleNamespace(steps=None, seconds=None)))
    resources: Any = SimpleNamespace(controller=controller)
    nothing: Any = None
    saving = IslandSaving(setup, nothing, nothing, nothing, steps, (nothing, nothing), resources)
    state = broken(steps.state) if is_broken else steps.state
    saving.after_step(StepContext(3, state, steps.method, None, nothing, nothing))
    assert len(saved) == saves, "without peers the save refuses it and ends the run"


def test_only_what_is_finite_of_a_diverged_optimizer_stays():
    moments = {"mu": jnp.array([1.0, jnp.nan, -2.0]), "nu": jnp.array([jnp.inf]), "count": jnp.array(7)}
    found = without_nonfinite(moments)
    np.testing.assert_array_equal(found["mu"], [1.0, 0.0, -2.0])
    np.testing.assert_array_equal(found["nu"], [0.0])
    assert found["count"] == 7
