"""Real islands over a real lighthouse: what they compute, and what a fleet does when some go or die."""

import os
import re
import secrets
import shutil
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from gregale import storage
from gregale.axes.layout import make_mesh
from gregale.cli import main
from gregale.data.mixtures import staged_examples, with_mixture
from gregale.data.preparation import prepare
from gregale.islands import state
from gregale.islands.method import Island
from gregale.islands.transport.lighthouse import read_records, records_beside
from gregale.programs.runtime.batches import BatchSharding
from gregale.programs.runtime.build import set_up
from gregale.runs.config import TrainConfig
from gregale.runs.history import RunPaths, State, summary_of
from gregale.runs.parsing import load
from tests.fleet import Fleet, Seconds, metrics
from tests.methods.islands import Fleet as ByHand
from tests.methods.islands import Member
from tests.programs.tiny import FAST_TO_COMPILE, checkpoint_steps, write_config, write_inputs
from tests.stores import BUCKET, CREDENTIALS

PATIENT = Seconds(heartbeat=20.0, reduce=60.0)
QUICK = Seconds(heartbeat=10.0, reduce=20.0)
PATIENCE_SECONDS = 300.0
SLOW_STEPS = Path(__file__).parents[1] / "slow_steps.py"
QUICK_TO_COMPILE = {"XLA_FLAGS": FAST_TO_COMPILE}
ROWS = 4  # of an island's batch
ISLAND = {
    "mesh": {"data": 1},
    "batch__size": ROWS,
    "batch__microbatches": 1,
    "optimizer__epsilon": 1e-4,
    "data__held_out": 0.0,
}
SYNC = {"type": "streaming_diloco", "period": 4, "fragments": 2, "delay": 2, "alpha": 0.5}
MORE = "data: {sources: {more: {type: text, files: ['text/[0-3].txt'], weight: 3}}}, batch: {size: 2}"
STAGED = ["--stages", f"[{{from: 4, {MORE}}}, {{from: 8, batch: {{size: 4, sequence_length: 16}}}}]"]
FOUR_BITS = ["--reduce.codec", "int4", "--reduce.gather_codec", "int4"]  # with the default feedback


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The text and a configuration; islands share what they compile."""
    folder = write_inputs(tmp_path_factory.mktemp("islands"))
    write_config(folder, "streaming.yaml", **ISLAND, cpu_devices=1, sync=SYNC)
    return folder


def trained(folder, names: list[str], *options: str) -> state.SavedOuterState:
    """The outer side at the end of two islands in lock step, killed after their first checkpoint and started again.

    That checkpoint is of the end of a stage, if there are any.
    """
    common = ["--islands.lockstep", "true", "--islands.min_members_to_start", "2", "--islands.lease_steps", "50"]
    with Fleet(folder, "streaming.yaml", PATIENT, [*common, *options], True, environment=QUICK_TO_COMPILE) as fleet:
        for name in names:
            fleet.start(name, pace=0.3)
        runs = [island.run for island in fleet.islands.values()]
        fleet.wait(lambda: all(checkpoint_steps(run) for run in runs), PATIENCE_SECONDS, "a checkpoint of both")
        for island in fleet.islands.values():
            island.kill()
        assert len({tuple(checkpoint_steps(run)) for run in runs}) == 1
        for name in names:
            fleet.start(name)
        codes = [island.process.wait(PATIENCE_SECONDS) for island in fleet.islands.values()]
        assert codes == [0, 0], fleet.tails()
        assert fleet.check() >= 2 * SYNC["fragments"]
        assert all(summary_of(RunPaths(run)).state is State.COMPLETE for run in runs)
        return state.read_outer(runs[0] / "outer", fleet.newest())


def test_four_bits_on_both_legs_with_feedback_do_what_they_do_in_one_process(folder, monkeypatch):
    """Also in three stages, between two of which the fleet is killed and goes on from its checkpoints.

    They have the errors of both phases. A stage begins when its round has arrived, with new leases of its mixture. That
    this is what `Diloco` does in one mesh, where its blocks hold the same values, `test_island` shows.
    """
    names, lease_steps, ends = ["a", "b"], 50, [4 + SYNC["delay"], 8 + SYNC["delay"], 12]
    options = [*FOUR_BITS, *STAGED, "--steps", str(ends[-1])]
    saved = trained(folder, names, *options, "--checkpoint.every", "4")
    monkeypatch.chdir(folder)
    config = load(TrainConfig, "streaming.yaml", [*options, "--islands.lighthouse", "by-hand:1"])
    stages, mesh = [stage.config for stage in config.each_stage], make_mesh(config.mesh, jax.devices()[:1])
    corpora = [prepare(each.data, each.batch.sequence_length, each.seed) for each in stages]
    setups = [set_up(each, corpora[0].tokenizer.vocabulary_size, mesh) for each in stages]
    assert isinstance(setups[0].method, Island)
    members = [Member(setups[0].method, setups[0].stepper(), setups[0].initial_state()) for _ in names]
    fleet, first, step, mixtures = ByHand(members), 0, 0, ()
    for setup, corpus, end in zip(setups, corpora, ends, strict=True):
        size, placement = setup.config.batch.size, BatchSharding(setup.batch_axes, setup.layout)
        mixtures = with_mixture(mixtures, first, *setup.config.mixture)
        examples = staged_examples(corpus.train_rows, mixtures, config.seed)
        begins = [first, first + lease_steps * size]
        for member in members:
            member.step = setup.stepper()
        while step < end:
            step += 1
            for number, member in enumerate(members):
                member.took(placement.placed(examples.batch(begins[number], size, range(size))), step)
                begins[number] += size
            fleet.follow(step)
        first += len(names) * lease_steps * size
    fleet.close(step)
    assert saved.outer.ledger.stages == tuple(each.first for each in mixtures[1:])
    assert saved.outer.ledger.next == first
    found = members[0].host.leaves()
    assert found.keys() == saved.arrays.keys()
    # The processes' programs are compiled for one device: a value, or the scale of a block of 64, at the border of two
    # codes may get the other one. Here it is one block of theta, and so of its momentum.
    far = sum(int(np.sum(np.abs(held.array - saved.arrays[name]) > 1e-6)) for name, held in found.items())
    assert far <= 2 * 64, f"of {sum(held.array.size for held in found.values())}"


def test_an_island_of_slow_steps_contributes_to_all_fragments_and_never_heals(folder):
    """Many rounds fall due within a step; the loops run ahead of the devices, as no line of metrics waits for them."""
    shutil.copy(SLOW_STEPS, folder)
    options = ["--steps", "100000", "--sync.period", "24", "--islands.min_members_to_start", "2"]
    options += ["--plugins", SLOW_STEPS.stem, "--log_every", "100000", "--checkpoint.every", "100000"]
    with Fleet(folder, "streaming.yaml", QUICK, options, environment=QUICK_TO_COMPILE) as fleet:
        for name, seconds in {"fast": 0.1, "slow": 2.0}.items():
            fleet.start(name, "--callbacks", f"[{{type: slow_steps, seconds: {seconds}}}]")

        def contributed() -> list[int]:
            return [each.round % SYNC["fragments"] for each in fleet.observe() if each.island == "slow" and each.weight]

        often = [0, 0, 0, 1, 1, 1]
        fleet.wait(lambda: not Counter(often) - Counter(contributed()), PATIENCE_SECONDS, "contributions")
        rounds = fleet.newest("slow")
        steps = (folder / f"steps-{fleet.islands['slow'].process.pid}").stat().st_size
        assert 2 * len(contributed()) >= min(steps, rounds)
        assert not any(each.healed for each in fleet.observe())
        assert fleet.check() > len(often)


TRIO = ("x", "y", "z")
BOUNDARY = 6  # the rounds before the second stage of the three
BEGINS = f"Stage 2 of 2 begins after round {BOUNDARY}, "


@pytest.fixture
def stores(s3_endpoint, monkeypatch) -> dict[str, str]:
    """Where two of three islands have their runs: as on separate sites, each has a part of a store of its own."""
    for name, value in {"AWS_ENDPOINT_URL": s3_endpoint, **CREDENTIALS}.items():
        monkeypatch.setenv(name, value)
    return {name: f"s3://{BUCKET}/site-{name}-{secrets.token_hex(4)}" for name in "yz"}


def test_a_fleet_goes_on_whatever_becomes_of_its_islands(folder, stores):
    """One is poisoned, one dies in a reduce, some do not belong to it, the one comes back; then all leave one by one.

    The reduce is that with which a stage ends, so the one comes back from its checkpoint to another stage. A round has
    more steps than the ten that may be skipped in a row.
    """
    options = ["--steps", "100000", "--checkpoint.every", "48", "--islands.min_members_to_start", "3"]
    options += ["--sync.period", "24", "--stages", f"[{{from: {12 * BOUNDARY}, batch: {{sequence_length: 16}}}}]"]
    how = {"doomed": True, "pace": 0.3, "environment": QUICK_TO_COMPILE, "stores": stores}
    with Fleet(folder, "streaming.yaml", QUICK, options, **how) as fleet:
        for name in TRIO:
            fleet.start(name)
        fleet.wait_for_members(TRIO, PATIENCE_SECONDS)
        one_is_poisoned(fleet, "x")
        one_dies_in_a_reduce(fleet, "z")
        who_does_not_belong_to_the_fleet_is_refused(fleet)
        one_heals(fleet, "z")
        all_leave(fleet, ["z", "y", "x"])
        for name in "yz":
            has_nothing_on_a_disk(fleet, name)
        assert checkpoint_steps(fleet.islands["x"].run)
        assert not list(fleet.folder.glob("site-*"))
        assert fleet.check() > 0


def test_a_revoked_island_ends_in_one_line_and_the_others_go_on(folder):
    """Also after a restart of the coordinator, which reads the list beside its token."""
    with Fleet(folder, "streaming.yaml", QUICK, ["--steps", "100000"], environment=QUICK_TO_COMPILE) as fleet:
        token = ["--token_file", str(fleet.token)]

        def start(name: str) -> None:
            fleet.start(name, "--islands.token_file", str(folder / f"{name}.key"))

        for name in ("stays", "goes"):
            assert main(["islands", "key", name, *token, "--out", str(folder / f"{name}.key")]) == 0
            start(name)
        fleet.wait_for_members(["stays", "goes"], PATIENCE_SECONDS)
        assert main(["islands", "revoke", "goes", *token]) == 0
        for _ in range(2):
            assert fleet.islands["goes"].process.wait(PATIENCE_SECONDS) == 2, fleet.tails()
            fleet.wait_for_members(["stays"], PATIENCE_SECONDS, fleet.newest())
            fleet.lighthouse.kill()
            fleet.lighthouse.wait()
            fleet.start_lighthouse()
            start("goes")
        assert fleet.islands["goes"].process.wait(PATIENCE_SECONDS) == 2, fleet.tails()
        errors = [line for line in fleet.islands["goes"].said().splitlines() if "error" in line]
        assert len(errors) == 3
        assert all(": the key of goes was revoked. This island ends, the others go on." in line for line in errors)
        fleet.check()


def test_rounds_go_on_without_the_first_coordinator_which_is_found_again(folder):
    options = ["--steps", "100000", "--islands.min_members_to_start", "3", "--islands.min_members", "2"]
    how = {"doomed": True, "pace": 0.1, "environment": QUICK_TO_COMPILE, "coordinators": 2}
    names = ("north", "east", "south")  # others have runs in this folder
    with Fleet(folder, "streaming.yaml", QUICK, options, **how) as fleet:
        for name in names:
            fleet.start(name)
        fleet.wait_for_members(names, PATIENCE_SECONDS)
        for change, address in (
            (fleet.lighthouse.kill, fleet.addresses[1]),
            (fleet.start_lighthouse, fleet.addresses[0]),
        ):
            change()
            line = f"requests go to the lighthouse at {address} now"
            for island in fleet.islands.values():
                fleet.wait(lambda island=island, line=line: line in island.said(), PATIENCE_SECONDS, line)
            fleet.wait_for_members(names, PATIENCE_SECONDS, fleet.newest() + 2)
        assert fleet.check() > 0


@pytest.mark.parametrize("coordinators", [1, 3])
def test_a_run_ends_with_one_state_although_a_coordinator_dies_at_its_end(folder, coordinators):
    """It dies when one island has ended, and before the other tells anybody of its last state.

    The only coordinator starts again with its disk; of three, the others are enough.
    """
    names = [f"{place}{coordinators}" for place in ("first", "last")]  # others have runs in this folder
    options = ["--steps", "4", "--islands.min_members_to_start", "2"]
    how = {"doomed": True, "environment": QUICK_TO_COMPILE, "coordinators": coordinators}
    with Fleet(folder, "streaming.yaml", Seconds(), options, **how) as fleet:
        records = [records_beside(fleet.token_of(index)) for index in range(coordinators)]
        for path in records:
            path.unlink(missing_ok=True)
        for name in names:
            fleet.start(name)
        first, last = fleet.islands.values()
        for island in (first, last):
            island.doom.write_text("saved")
        for island in (first, last):
            fleet.wait(lambda island=island: " is saved." in island.said(), PATIENCE_SECONDS, "a last checkpoint")
        last.signal(signal.SIGSTOP)  # it does not hear either that the other one has told this state
        first.doom.unlink()
        assert first.process.wait(PATIENCE_SECONDS) == 0, fleet.tails()
        fleet.lighthouse.kill()
        fleet.lighthouse.wait()
        last.doom.unlink()
        last.signal(signal.SIGCONT)
        code = last.process.wait(PATIENCE_SECONDS)
        if coordinators == 1:
            assert code == os.EX_TEMPFAIL, fleet.tails()
            assert last.said().count("half of the lighthouses or more have not recorded that") == 1
            fleet.start_lighthouse()
            code = fleet.start(last.name).process.wait(PATIENCE_SECONDS)
        assert code == 0, fleet.tails()
        digests = {each.island: each.digest for each in fleet.observe()}  # of the last round
        assert set(digests) == set(names)
        assert len(set(digests.values())) == 1
        recorded = {state for path in records for _, state in read_records(path).values()}
        assert recorded == set(digests.values())
        assert all(summary_of(RunPaths(each.run)).state is State.COMPLETE for each in (first, last))
        assert fleet.check() > 0


def one_is_poisoned(fleet: Fleet, name: str) -> None:
    """Its parameters and its optimizer are NaN; it begins again, and the others go on."""
    island = fleet.islands[name]
    island.doom.write_text("poison")
    line = re.compile(r"this island has diverged .*: it begins again from the outer parameters of round (\d+)")
    fleet.wait(lambda: line.search(island.said()), PATIENCE_SECONDS, f"{name} begins again")
    (begun,) = map(int, line.findall(island.said()))
    fleet.wait(lambda: fleet.newest() >= begun + 3, PATIENCE_SECONDS, "three rounds")
    # A message that had departed before may be part of the first of them.
    assert any(s.island == name and begun + 1 < s.round <= begun + 3 and s.weight > 0 for s in fleet.observe())
    assert not any(each.healed for each in fleet.observe())
    fleet.check()


def one_dies_in_a_reduce(fleet: Fleet, name: str) -> None:
    victim, others = fleet.islands[name], [each for each in TRIO if each != name]
    fleet.wait(lambda: all(checkpoint_steps(each.run) for each in fleet.islands.values()), PATIENCE_SECONDS, "saved")
    fleet.wait(lambda: fleet.newest() >= BOUNDARY - 1, PATIENCE_SECONDS, "the last round of the stage")
    victim.doom.write_text("reduce")
    fleet.wait(lambda: not victim.lives, PATIENCE_SECONDS, f"{name} dies")
    assert victim.process.returncode == -signal.SIGKILL
    fleet.wait_for_members(others, PATIENCE_SECONDS, max(fleet.newest(), BOUNDARY))
    assert [BEGINS in fleet.islands[each].said() for each in (name, *others)] == [False, True, True]
    fleet.check()


def who_does_not_belong_to_the_fleet_is_refused(fleet: Fleet) -> None:
    """In one line, and the others go on; an island that finds no lighthouse waits until it is told to end."""
    seeded = fleet.start("seeded", "--seed", "5")
    lonely = fleet.start("lonely", "--islands.lighthouse", "127.0.0.1:9")  # where nobody listens
    host, port = fleet.islands["x"].address.partition("/")[0].split(":")
    with socket.create_connection((host, int(port))) as garbage, socket.create_connection((host, int(port))):
        garbage.sendall(os.urandom(4096) + b"\r\n\r\n")  # the other connection says nothing
        assert seeded.process.wait(PATIENCE_SECONDS) == 2, fleet.tails()
        assert lonely.leave(PATIENCE_SECONDS) == 128 + signal.SIGTERM, lonely.said()
        fleet.wait_for_members(["x", "y"], PATIENCE_SECONDS, fleet.newest())
    assert "Traceback" not in lonely.said() + seeded.said()
    (error,) = [line for line in seeded.said().splitlines() if "error" in line]
    assert error.startswith("gregale: error: seed is 0 in the fleet, but 5 in this island; this island ends")
    assert "does not speak TLS" in fleet.islands["x"].said()
    assert fleet.islands["x"].lives
    assert fleet.islands["y"].lives
    for name in ("seeded", "lonely"):
        del fleet.islands[name]


def all_leave(fleet: Fleet, names: list[str]) -> None:
    """One after the other; the one that leaves first has no part in the newest rounds."""
    for count, name in enumerate(names, 1):
        assert fleet.islands[name].leave(PATIENCE_SECONDS) == 128 + signal.SIGTERM, fleet.tails()
        assert "Left the fleet by SIGTERM" in fleet.islands[name].said()
        assert "Traceback" not in fleet.islands[name].said()
        if rest := names[count:]:
            fleet.wait_for_members(rest, PATIENCE_SECONDS, fleet.newest(name))


def one_heals(fleet: Fleet, name: str) -> None:
    """It comes back to a fleet that trains, heals and contributes, with a batch of its own size.

    Weights are tokens, and leases are whole batches of each island.
    """
    since = time.time()
    fleet.start(name, "--batch.size", str(ROWS // 2))
    fleet.wait(
        lambda: any(s.island == name and s.ended > since and s.weight > 0 for s in fleet.observe()),
        PATIENCE_SECONDS,
        f"{name} contributes to a round",
    )
    fleet.wait_for_members(TRIO, PATIENCE_SECONDS, fleet.newest())
    assert any(each.island == name and each.healed for each in fleet.observe())
    island = fleet.islands[name]
    (begun,) = map(int, re.findall(r"Stage 2 of 2 begins after round \d+, step (\d+)", island.said()))
    tokens = [line["tokens"] for line in metrics(island.run) if "loss" in line and line["step"] > begun]
    assert set(np.diff(tokens)) == {16 * ROWS // 2}, "it has trained in the fleet's stage alone"
    assert not any("no state here" in island.said() for island in fleet.islands.values())


def has_nothing_on_a_disk(fleet: Fleet, name: str) -> None:
    """The run of an island whose runs are in a store."""
    run = fleet.islands[name].run
    assert checkpoint_steps(run)
    assert {"config.yaml", "island.address", "metrics.jsonl", "rounds.jsonl"} <= set(storage.names(run))
    saved = storage.names(run / "outer")
    assert saved
    assert all((run / "outer" / each / state.MANIFEST).is_file() for each in saved)
    assert not (fleet.folder / "runs" / name).exists()
