"""An island's outer side as it is saved: what is read is what was written, damage is found; and a peer's inner side."""

import json
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest

from gregale.checkpoint import files
from gregale.errors import UserError
from gregale.islands import state
from gregale.islands.outer import OwnLeaves
from gregale.islands.protocol.ledger import LeasePolicy, LeaseReport, Ledger, advance
from gregale.islands.protocol.messages import Generation, OuterRecord
from gregale.islands.transport.transfer import VersionedArray
from gregale.methods.schedule import Schedule
from gregale.storage import StoragePath, StoreError, names, storage_path, write_bytes
from gregale.training.state import Stepper
from tests.disk import largest_file
from tests.mesh.support import layout_of
from tests.methods.islands import Member, island_on, rows
from tests.stores import Fault, proxied

LEDGER = advance(Ledger(), [LeaseReport("a", "s", 3)], LeasePolicy(8, 4))
OUTER = OuterRecord(Generation(2, "name"), 7, "digest", "key", 3, LEDGER)
LEAVES = {
    "0/theta/w|0,1": VersionedArray(np.arange(12, dtype=np.float32).reshape(3, 4), 7),
    "0/optimizer/count": VersionedArray(np.array(5, np.int32), 7),
    "1/theta/nothing|": VersionedArray(np.zeros((0, 2), np.float32), 4),
    "1/theta/turned|": VersionedArray(np.arange(6, dtype=np.int64).reshape(2, 3).T, 4),
}
OWN = OwnLeaves({"0/second/w|/scales": np.arange(4, dtype=ml_dtypes.bfloat16)}, {0: "a, b"})


@pytest.fixture(autouse=True)
def small_parts(monkeypatch) -> None:
    """Arrays begin and end anywhere in a part."""
    monkeypatch.setattr(files, "PART_BYTES", 20)


@pytest.fixture(params=["disk", "s3"])
def directory(request, tmp_path) -> StoragePath:
    return tmp_path / "outer" if request.param == "disk" else request.getfixturevalue("s3") / "outer"


def write(directory: StoragePath, outer: OuterRecord = OUTER, leaves: dict[str, VersionedArray] = LEAVES) -> None:
    state.write_outer(directory, outer, leaves, OWN)


def part_names(directory: StoragePath) -> list[str]:
    return [name for name in names(state.folder_of(directory, 7)) if name != state.MANIFEST]


def test_an_outer_state_is_read_as_it_was_written(directory):
    write(directory)
    saved = state.read_outer(directory, 7)
    assert saved.outer == OUTER
    assert saved.versions == {name: held.version for name, held in LEAVES.items()}
    for name, held in LEAVES.items():
        assert saved.arrays[name].dtype == held.array.dtype
        np.testing.assert_array_equal(saved.arrays[name], held.array)
    assert saved.own.groups == OWN.groups
    np.testing.assert_equal(saved.own.arrays, OWN.arrays)
    assert len(part_names(directory)) == 6, "108 bytes"


def test_a_round_is_written_again_only_for_another_generation(directory):
    write(directory, leaves={name: VersionedArray(held.array + 1, 7) for name, held in LEAVES.items()})
    before = part_names(directory)
    write(directory)
    assert part_names(directory) == before
    again = replace(OUTER, generation=Generation(3, "other"))
    write(directory, again)
    saved = state.read_outer(directory, 7)
    assert saved.outer == again
    np.testing.assert_array_equal(saved.arrays["0/theta/w|0,1"], LEAVES["0/theta/w|0,1"].array)
    assert len(part_names(directory)) == 6


def test_files_of_a_killed_process_are_ignored_and_deleted(directory):
    folder = state.folder_of(directory, 7)
    folder.mkdir(parents=True)
    (folder / "0badc0de-00000").write_bytes(b"torn")
    with pytest.raises(UserError, match="round-00000007 cannot be read"):
        state.read_outer(directory, 7)
    write(directory)
    assert state.read_outer(directory, 7).outer == OUTER
    assert len(part_names(directory)) == 6


def test_a_disk_that_is_full_keeps_the_old_round_and_nothing_of_the_new(tmp_path):
    write(tmp_path)
    before = part_names(tmp_path)
    with largest_file(10), pytest.raises(OSError, match="File too large"):
        write(tmp_path, replace(OUTER, generation=Generation(3, "other")))
    assert state.read_outer(tmp_path, 7).outer == OUTER
    assert part_names(tmp_path) == before


def test_a_store_that_fails_keeps_the_old_round_and_is_no_damage(s3, s3_endpoint, monkeypatch):
    write(s3)
    with proxied(s3_endpoint) as (endpoint, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        proxy.faults[:] = [Fault("expired", 1000, "PUT", state.MANIFEST)]
        before = part_names(s3)
        with pytest.raises(StoreError, match="the store refused access"):
            write(s3, replace(OUTER, generation=Generation(3, "other")))
        assert part_names(s3) == before
        proxy.faults[:] = [Fault("denied", 1000, "GET", "-00001")]
        with pytest.raises(StoreError, match="the store refused access"):
            state.read_outer(s3, 7)
        proxy.faults.clear()
        assert state.read_outer(storage_path(str(s3)), 7).outer == OUTER


def test_the_format_before_is_read_and_a_newer_one_is_refused(tmp_path):
    write(tmp_path)
    path = state.folder_of(tmp_path, 7) / state.MANIFEST
    manifest = json.loads(path.read_bytes())
    assert manifest.pop("format") == 1
    fields = [*manifest["outer"], *manifest["outer"]["ledger"]]
    known = "generation round digest last voters ledger sizes next free leases skipped stages"
    assert fields == known.split(), "other fields are another format"
    write_bytes(path, json.dumps(manifest).encode())
    assert state.read_outer(tmp_path, 7).outer == OUTER
    write_bytes(path, b'{"format": 2, "new": "fields"}')
    with pytest.raises(UserError, match=r"^The outer .* have format 2; this version .* reads 0 and 1\. Start"):
        state.read_outer(tmp_path, 7)


@pytest.mark.parametrize("name", ["part", state.MANIFEST])
def test_damage_is_found(tmp_path, name):
    write(tmp_path)
    path = state.folder_of(tmp_path, 7) / (part_names(tmp_path)[1] if name == "part" else name)
    content = path.read_bytes()
    for damaged in (content[:-3], content[:8] + b"\xff" + content[9:], b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read"):
            state.read_outer(tmp_path, 7)


def test_other_rounds_are_deleted(directory):
    for number in (5, 6, 7):
        write(directory, replace(OUTER, round=number))
    state.keep_rounds(directory, [6, 7])
    assert names(directory) == ["round-00000006", "round-00000007"]
    state.keep_rounds(directory / "nothing", [6, 7])


def test_a_peers_optimizer_replaces_the_own_one():
    island = island_on(layout_of(data=2, model=2), Schedule(4, layers=3))
    step = Stepper(island, island.inner.model)
    peer, joiner = Member(island, step), Member(island, step)
    for number in range(1, 4):
        peer.train(rows(number, 1), number)
    theirs, own = peer.state.method.psdp, joiner.state.method.psdp
    arrays = state.on_host(theirs)
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == state.expected(own)
    taken = state.taken_over(own, arrays)
    same = jax.tree.map(
        lambda x, y: np.array_equal(x, y), (taken.sharded, taken.gathered), (theirs.sharded, theirs.gathered)
    )
    assert all(jax.tree.leaves(same))
    assert taken.parameters is own.parameters
    places = jax.tree.map(lambda x, y: x.sharding == y.sharding, taken, own)
    assert all(jax.tree.leaves(places))
