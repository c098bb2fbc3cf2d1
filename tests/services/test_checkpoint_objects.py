"""Checkpoints in a store come back as they were, on any mesh, and only if all of them is there."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gregale.errors import UserError
from gregale.services.checkpoint import CheckpointConfig
from gregale.services.checkpoint.manifest import MANIFEST
from gregale.services.checkpoint.objects import ObjectShelf
from gregale.services.checkpoint.pieces import Block, Piece, Rows, parts, rows_for
from gregale.services.checkpoint.store import Checkpoints
from gregale.storage import Patience, place
from tests.services.test_checkpoint import assert_same_bits, mesh_of, small, state, template_of
from tests.stores import Fault, proxied


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def folder(s3):
    return s3 / "checkpoints"


@pytest.fixture
def checkpoints(folder, reports):
    with Checkpoints(folder, CheckpointConfig(keep_last=2), reports.append) as opened:
        yield opened


def without_key(tree: dict) -> dict:
    """Keys of random numbers are in no training state, and an object holds numbers only."""
    return tree | {
        "extras": tuple(leaf for leaf in tree["extras"] if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
    }


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_restores_under_another_mesh(kind, request, monkeypatch):
    folder = request.getfixturevalue(kind) / "checkpoints"
    monkeypatch.setattr(
        "gregale.services.checkpoint.store.ObjectShelf", lambda place: ObjectShelf(place, part_bytes=1000)
    )
    saved = without_key(state(7, PartitionSpec("data"), mesh_of(2, 4)))
    with Checkpoints(folder, report=lambda _: None) as checkpoints:
        checkpoints.save(30, saved, {"tokens": 12})
        for spec, shape in (
            (PartitionSpec("data", "replica"), (2, 4)),
            (PartitionSpec(("data", "replica")), (4, 2)),
            (PartitionSpec(None, "data"), (1, 3)),
            (PartitionSpec(), (1, 1)),
        ):
            restored = checkpoints.latest(template_of(saved, spec, mesh_of(*shape)))
            assert (restored.step, restored.metadata) == (30, {"tokens": 12})
            assert_same_bits(restored.tree, saved)
            assert restored.tree["model"].weight.array.sharding == NamedSharding(mesh_of(*shape), spec)
    assert len([name for name in folder.files_below() if "/00000-" in name]) > 3, "in several parts"


def test_a_part_is_restored_on_request_and_what_is_not_there_is_named(checkpoints, folder):
    assert checkpoints.latest(small(0)) is None
    checkpoints.save(5, {"params": small(2), "optimizer": small(3)}, {})
    assert_same_bits(checkpoints.restore(5, {"params": small(0)}, partial=True).tree, {"params": small(2)})
    with pytest.raises(UserError, match=rf"checkpoint {folder}/step-00000005 was written .* also has optimizer/step"):
        checkpoints.restore(5, {"params": small(0)})
    with pytest.raises(UserError, match=rf"no checkpoint of step 6 in {folder}; there are: 5\."):
        checkpoints.restore(6, small(0))


def test_who_has_lost_the_run_deletes_nothing_that_its_new_process_writes(folder, reports):
    def lost() -> None:
        raise UserError("it is being trained by another now")

    (folder / "step-00000002" / "another" / "00000-00000").write_bytes(b"under way")
    with Checkpoints(folder, report=reports.append, check=lost) as checkpoints:
        checkpoints.save(4, small(4), {})
        assert checkpoints.failure == "it is being trained by another now"
    assert list(folder.files_below()) == ["step-00000002/another/00000-00000"]
    assert reports == [
        "The checkpoint of step 4 could not be saved: it is being trained by another now. There is no earlier one."
    ]


def test_damage_to_any_object_is_reported_and_the_one_before_is_used(checkpoints, reports, folder):
    for step in (10, 20):
        checkpoints.save(step, small(step), {"of": step})
    checkpoints.wait()
    assert reports == ["The checkpoint of step 10 is saved.", "The checkpoint of step 20 is saved."]
    newest = folder / "step-00000020"
    names = list(newest.files_below())
    assert sorted(name.rpartition("/")[2] for name in names) == [
        "00000-00000",
        *("leaves.json", "manifest.json", "metadata.json", "pieces.json"),
    ]
    for name in names:
        intact = (newest / name).read_bytes()
        flipped = bytes([intact[0] ^ 4]) + intact[1:]
        others = [intact[: len(intact) // 2], None] if name.endswith("00000-00000") else []
        for content in (flipped, *others):
            (newest / name).unlink() if content is None else (newest / name).write_bytes(content)
            restored = checkpoints.latest(small(0))
            assert (restored.step, restored.metadata) == (10, {"of": 10}), name
            assert_same_bits(restored.tree, small(10))
            assert f"step 20 is damaged ({name}" in reports[-1]
            assert "step 10 is used instead" in reports[-1]
        (newest / name).write_bytes(intact)
    assert checkpoints.latest(small(0)).step == 20


def test_what_has_no_manifest_does_not_count_and_goes_with_the_next_save(checkpoints, folder):
    checkpoints.save(10, small(10), {})
    checkpoints.save(20, small(20), {})
    checkpoints.wait()
    (folder / "step-00000020" / MANIFEST).unlink()
    (folder / "notes").write_bytes(b"of somebody else")
    with Checkpoints(folder) as again:
        assert again.steps() == [10]
        assert again.latest(small(0)).step == 10
        again.save(30, small(30), {})
        again.wait()
    assert {name.partition("/")[0] for name in folder.files_below()} == {"notes", "step-00000010", "step-00000030"}


def test_going_on_from_before_a_damaged_one_replaces_it(checkpoints, reports, folder):
    for step in (10, 20):
        checkpoints.save(step, small(step), {})
    checkpoints.wait()
    damaged = next(name for name in folder.files_below() if name.startswith("step-00000020") and "leaves" in name)
    (folder / damaged).unlink()
    with Checkpoints(folder, report=reports.append) as again:
        assert again.latest(small(0)).step == 10
        again.save(20, small(2), {})
        again.wait()
        assert again.steps() == [10, 20]
        assert_same_bits(again.latest(small(0)).tree, small(2))
    manifest = json.loads((folder / "step-00000020" / MANIFEST).read_bytes())["files"]
    assert set((folder / "step-00000020").files_below()) == {MANIFEST, *manifest}, "nothing of the damaged one is left"


def test_keeps_the_last_and_the_milestones(s3):
    with Checkpoints(s3, CheckpointConfig(keep_last=1, keep_every=20), report=lambda _: None) as checkpoints:
        for step in (10, 20, 30, 40, 50):
            checkpoints.save(step, small(step), {})
        checkpoints.wait()
        assert checkpoints.steps() == [20, 40, 50]
    assert {name.partition("/")[0] for name in s3.files_below()} == {"step-00000020", "step-00000040", "step-00000050"}


@pytest.mark.parametrize("where", ["leaves.json", "00000-00000", MANIFEST])
def test_a_store_that_fails_costs_one_checkpoint(s3, s3_endpoint, monkeypatch, reports, where):
    with proxied(s3_endpoint) as (endpoint, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        folder = place(str(s3), Patience(seconds=0.3, first_delay_seconds=0.05))
        with Checkpoints(folder, report=reports.append) as checkpoints:
            checkpoints.save(1, small(1), {})
            checkpoints.wait()
            proxy.faults[:] = [Fault(503, 1000, "PUT", where)]
            checkpoints.save(2, small(2), {})
            checkpoints.wait()
            assert "the store did not answer as it should for 0.3 s" in checkpoints.failure
            assert reports[-1].startswith(f"The checkpoint of step 2 could not be saved: {s3}/step-00000002/")
            assert reports[-1].endswith("The newest one is that of step 1.")
            assert checkpoints.steps() == [1]
            proxy.faults[:] = [Fault(500, 1, "PUT", where)]
            checkpoints.save(2, small(2), {})
            assert_same_bits(checkpoints.latest(small(0)).tree, small(2))
            assert (checkpoints.failure, checkpoints.steps()) == (None, [1, 2])
            proxy.faults[:] = [Fault("expired", 1000)]
            with pytest.raises(UserError, match=r"the store refused access .*token has expired"):
                checkpoints.latest(small(0))
            proxy.faults.clear()


def test_parts_are_cut_anywhere():
    pieces = [np.arange(5, dtype=np.uint8), np.arange(5, 12, dtype=np.uint8), np.arange(12, 13, dtype=np.uint8)]
    assert [b"".join(part) for part in parts(pieces, 4)] == [bytes(range(a, min(a + 4, 13))) for a in (0, 4, 8, 12)]
    assert list(parts([], 4)) == []


def test_only_the_rows_of_a_piece_that_are_asked_for_are_read():
    piece = Piece(Block((4, 8), (4, 8)), process=3, offset=100)
    wanted = [Block((0, 0), (5, 9)), Block((6, 10), (1, 1))]
    assert rows_for(piece, wanted, item_bytes=2) == Rows(Block((4, 8), (3, 8)), 3, 100, 100 + 3 * 8 * 2)
    assert rows_for(piece, [Block((0, 0), (4, 99))], item_bytes=2) is None
    assert rows_for(Piece(Block((), ()), 0, 7), [Block((), ())], 4) == Rows(Block((), ()), 0, 7, 11)
