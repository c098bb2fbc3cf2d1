"""Real islands over the real lighthouse and Gloo: what they compute, and what a fleet does when some go or die."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from gregale import storage
from gregale.axes.mesh import make_mesh
from gregale.data.preparation import prepare
from gregale.islands import outer_checkpoint
from gregale.islands.protocol.headers import OuterRecord
from gregale.methods.island import Island
from gregale.programs.runtime.batches import Placement
from gregale.programs.runtime.setup import set_up
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.runs.run_paths import RunPaths
from gregale.runs.run_summary import State, summary_of
from tests.fleet import Fleet, Seconds
from tests.methods.islands import Fleet as ByHand
from tests.methods.islands import Member
from tests.programs.tiny import FAST_TO_COMPILE, checkpoint_steps, write_config, write_inputs
from tests.stores import BUCKET, CREDENTIALS

PATIENT = Seconds(heartbeat=20.0, reduce=60.0)
QUICK = Seconds(heartbeat=10.0, reduce=20.0)
PATIENCE_SECONDS = 300.0
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
FOUR_BITS = ["--reduce.codec", "int4", "--reduce.gather_codec", "int4"]  # with the default feedback


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The text and a configuration; islands share what they compile."""
    folder = write_inputs(tmp_path_factory.mktemp("islands"))
    write_config(folder, "streaming.yaml", **ISLAND, cpu_devices=1, sync=SYNC)
    return folder


def trained(folder, names: list[str], *options: str) -> outer_checkpoint.SavedOuterState:
    """The outer side at the end of two islands in lock step, killed after their first checkpoint and started again."""
    common = [
        "--islands.lockstep",
        "true",
        "--islands.min_members_to_start",
        "2",
        "--islands.lease_steps",
        "50",
        *options,
    ]
    with Fleet(folder, "streaming.yaml", PATIENT, common, True, environment=QUICK_TO_COMPILE) as fleet:
        for name in names:
            fleet.start(name, pace=0.5)
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
        return outer_checkpoint.read(runs[0] / "outer", fleet.newest())


def test_four_bits_on_both_legs_with_feedback_do_what_they_do_in_one_process(folder, monkeypatch):
    """Also if the fleet is killed and goes on from its checkpoints: errors of both legs are in them.

    That this is what `Diloco` does in one mesh, where its blocks hold the same values, `test_island` shows.
    """
    names, steps = ["a", "b"], 2 * SYNC["period"]
    options = [*FOUR_BITS, "--steps", str(steps)]
    saved = trained(folder, names, *options, "--checkpoint.every", "4")
    monkeypatch.chdir(folder)
    config = load(TrainConfig, "streaming.yaml", [*options, "--islands.lighthouse", "by-hand:1"])
    corpus = prepare(config.data, config.batch.sequence_length, config.seed)
    setup = set_up(config, corpus.tokenizer.vocabulary_size, make_mesh(config.mesh, jax.devices()[:1]))
    assert isinstance(setup.method, Island)
    stepper, placement = setup.stepper(), Placement(setup.batch_axes, setup.layout)
    members = [Member(setup.method, stepper, setup.initial_state()) for _ in names]
    fleet = ByHand(members)
    for step in range(1, steps + 1):
        for first, member in zip(firsts(saved.outer, names), members, strict=True):
            values = corpus.train.batch(first + (step - 1) * ROWS, ROWS, range(ROWS))
            member.took({name: placement.placed(array) for name, array in values.items()}, step)
        fleet.follow(step)
    found = members[0].host.leaves()
    assert found.keys() == saved.arrays.keys()
    far = [np.ravel(np.abs(held.array - saved.arrays[name]) > 1e-6) for name, held in found.items()]
    # The processes' programs are compiled for one device: a value at the border of two codes may get the other one.
    assert np.mean(np.concatenate(far)) < 1e-3


def firsts(outer: OuterRecord, names: list[str]) -> list[int]:
    """The first example of each island's lease; it had a single one."""
    leases = [lease for lease in outer.ledger.leases if lease.name in names]
    assert all(lease.used > 0 and len(lease.spans) == 1 for lease in leases)
    return [lease.spans[0][0] - lease.used for lease in leases]


TRIO = ("x", "y", "z")


@pytest.fixture(scope="module")
def stores(s3_endpoint) -> Iterator[dict[str, str]]:
    """Where two of three islands have their runs: as on separate sites, each has a part of a store of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"AWS_ENDPOINT_URL": s3_endpoint, **CREDENTIALS}.items():
            patch.setenv(name, value)
        yield {name: f"s3://{BUCKET}/site-{name}-{secrets.token_hex(4)}" for name in "yz"}


@pytest.fixture(scope="module")
def trio(folder, stores):
    """Three islands that make rounds together; a test that disturbs them waits until they do so again."""
    options = ["--islands.min_members_to_start", "3", "--steps", "100000", "--checkpoint.every", "20"]
    how = {"doomed": True, "pace": 0.5, "environment": QUICK_TO_COMPILE, "stores": stores}
    with Fleet(folder, "streaming.yaml", QUICK, options, **how) as fleet:
        for name in TRIO:
            fleet.start(name)
        fleet.wait_for_members(TRIO, PATIENCE_SECONDS)
        yield fleet
        assert fleet.check() > 0


def takes_part(fleet: Fleet, name: str) -> None:
    """The island has contributed to a round since now, and all others too."""
    since = time.time()
    fleet.wait(
        lambda: any(s.island == name and s.ended > since and s.weight > 0 for s in fleet.observe()),
        PATIENCE_SECONDS,
        f"{name} contributes to a round",
    )
    fleet.wait_for_members(TRIO, PATIENCE_SECONDS, fleet.newest())
    fleet.check()


def test_survivors_of_a_kill_in_the_middle_of_a_reduce_go_on_and_the_dead_one_heals(trio):
    victim = trio.islands["z"]
    victim.doom.write_text("reduce")
    trio.wait(lambda: not victim.lives, PATIENCE_SECONDS, "z dies")
    assert victim.process.returncode == -signal.SIGKILL
    trio.wait_for_members(["x", "y"], PATIENCE_SECONDS, trio.newest())
    trio.check()
    trio.start("z")
    takes_part(trio, "z")
    assert any(each.island == "z" and each.healed for each in trio.observe())


def test_who_does_not_belong_to_the_fleet_is_refused_in_one_line_and_the_others_go_on(trio, folder):
    other = folder / "other_token"
    other.write_text(secrets.token_hex(32))
    other.chmod(0o600)
    stranger = trio.start("stranger", "--islands.token_file", str(other))
    seeded = trio.start("seeded", "--seed", "5")
    lonely = trio.start("lonely", "--islands.lighthouse", "127.0.0.1:9")  # where nobody listens
    host, port = trio.islands["x"].address.partition("/")[0].split(":")
    with socket.create_connection((host, int(port))) as garbage, socket.create_connection((host, int(port))):
        garbage.sendall(os.urandom(4096) + b"\r\n\r\n")  # the other connection says nothing
        codes = [each.process.wait(PATIENCE_SECONDS) for each in (stranger, seeded)]
        assert codes == [2, 2], trio.tails()
        assert lonely.leave(PATIENCE_SECONDS) == 128 + signal.SIGTERM, lonely.said()
        trio.wait_for_members(TRIO, PATIENCE_SECONDS, trio.newest())
    assert "Traceback" not in lonely.said()
    seeds = "gregale: error: seed is 0 in the fleet, but 5 in this island; this island ends"
    refused = [(stranger, "token"), (seeded, seeds)]
    for island, reason in refused:
        assert "Traceback" not in island.said()
        errors = [line for line in island.said().splitlines() if "error" in line]
        assert len(errors) == 1, island.said()
        assert reason in errors[0]
    assert "does not speak HTTP" in trio.islands["x"].said()
    for name in ("stranger", "seeded", "lonely"):
        del trio.islands[name]
    assert all(island.lives for island in trio.islands.values())


def test_a_whole_fleet_that_is_told_to_leave_goes_on_from_its_newest_round(trio):
    """One after the other; the one that leaves first had no part in the newest rounds."""
    assert trio.islands["z"].leave() == 128 + signal.SIGTERM
    assert "Left the fleet by SIGTERM" in trio.islands["z"].said()
    assert "Traceback" not in trio.islands["z"].said()
    trio.wait_for_members(["x", "y"], PATIENCE_SECONDS, trio.newest("z"))
    for name in ("x", "y"):
        trio.islands[name].process.terminate()
    assert [trio.islands[name].process.wait(PATIENCE_SECONDS) for name in ("x", "y")] == [143, 143], trio.tails()
    newest = trio.newest()
    for name in TRIO:
        # A batch of its own: weights are tokens, leases are whole batches of each.
        trio.start(name, *(["--batch.size", str(ROWS // 2)] if name == "z" else []))
    trio.wait_for_members(TRIO, 2 * PATIENCE_SECONDS, newest)
    assert not any("no state here" in trio.islands[name].said() for name in TRIO)
    after = [each.round for each in trio.observe() if each.round > newest and not each.healed]
    assert min(after) == newest + 1
    takes_part(trio, "z")


def test_who_has_its_run_in_a_store_has_nothing_of_it_on_a_disk(trio):
    for name in "yz":
        run = trio.islands[name].run
        assert checkpoint_steps(run)
        assert {"config.yaml", "island.address", "metrics.jsonl", "rounds.jsonl"} <= set(storage.names(run))
        saved = storage.names(run / "outer")
        assert saved
        assert all((run / "outer" / each / outer_checkpoint.MANIFEST).is_file() for each in saved)
        assert not (trio.folder / "runs" / name).exists()
    assert checkpoint_steps(trio.islands["x"].run)
    assert not list(trio.folder.glob("site-*"))
