"""Checkpoints come back as they were, on any mesh, and say so when they cannot."""

import errno
import json
import os
import re
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from gregale.checkpoint import CheckpointConfig, files, manifest
from gregale.checkpoint.files import Region, RowRange, ShardExtent, rows_for
from gregale.checkpoint.manifest import MANIFEST
from gregale.checkpoint.store import Checkpoints
from gregale.errors import UserError
from gregale.storage import RetryPolicy, StoragePath, files_below, names, storage_path
from tests.disk import largest_file
from tests.stores import Fault, proxied

Embed, Vocab = Axis("embed", 16), Axis("vocab", 24)


class Linear(eqx.Module):
    weight: NamedArray
    name: str = eqx.field(static=True)
    activation: object


def mesh_of(replica: int, data: int) -> jax.sharding.Mesh:
    devices = np.asarray(jax.devices()[: replica * data]).reshape(replica, data)
    return jax.sharding.Mesh(devices, ("replica", "data"))


def state(seed: int, spec: PartitionSpec, mesh: jax.sharding.Mesh) -> dict:
    """A tree with all kinds of leaves: named, optimizer state, scalars, small floats, empty arrays."""
    sharded, everywhere = NamedSharding(mesh, spec), NamedSharding(mesh, PartitionSpec())
    key = jax.random.key(seed)
    weight = jax.device_put(jax.random.normal(key, (Embed.size, Vocab.size)), sharded)
    model = Linear(hax.named(weight, (Embed, Vocab)), "a name", jax.nn.relu)
    params = eqx.filter(model, eqx.is_array)
    optimizer = jax.tree.map(lambda x: jax.device_put(x, everywhere), optax.adam(1e-3).init(params))
    extras = (jnp.int32(seed), weight.astype(jnp.bfloat16), jnp.zeros((0, 3)), (weight > 0), jnp.int8([1, -seed]))
    return {"model": model, "optimizer": optimizer, "extras": jax.device_put(extras, everywhere)}


def template_of(tree, spec: PartitionSpec, mesh: jax.sharding.Mesh):
    def struct(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        at = spec if leaf.shape == (Embed.size, Vocab.size) else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, at))

    return jax.tree.map(struct, tree)


def assert_same_bits(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not isinstance(other, jax.Array):
            assert one is other
            continue
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def small(step: int) -> dict:
    return {"weight": jnp.arange(1000, dtype=jnp.float32) * step, "step": jnp.int32(step)}


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture(params=["disk", "s3"])
def folder(request, tmp_path) -> StoragePath:
    return (tmp_path if request.param == "disk" else request.getfixturevalue("s3")) / "checkpoints"


@pytest.fixture
def checkpoints(tmp_path, reports):
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig(keep_last=3), reports.append) as opened:
        yield opened


@pytest.mark.parametrize("where", ["tmp_path", "s3", "gs"])
def test_restores_under_another_mesh(where, request, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 1000)
    folder = request.getfixturevalue(where) / "checkpoints"
    saved = state(7, PartitionSpec("data"), mesh_of(2, 4))
    meshes = [
        (PartitionSpec("data", "replica"), (2, 4)),
        (PartitionSpec(("data", "replica")), (4, 2)),
        (PartitionSpec("replica"), (8, 1)),
        (PartitionSpec(None, "data"), (1, 3)),
        (PartitionSpec(), (1, 1)),
    ]
    with Checkpoints(folder, report=lambda _: None) as checkpoints:
        checkpoints.save(30, saved, {"tokens": 12, "config": {"name": "x"}})
        for spec, shape in meshes if where == "tmp_path" else meshes[:1]:  # a store only reads the same ranges
            restored = checkpoints.latest(template_of(saved, spec, mesh_of(*shape)))
            assert restored.step == 30
            assert restored.metadata == checkpoints.metadata(30) == {"tokens": 12, "config": {"name": "x"}}
            assert_same_bits(restored.tree, saved)
            assert restored.tree["model"].weight.array.sharding == NamedSharding(mesh_of(*shape), spec)
            assert restored.tree["model"].weight.axes == (Embed, Vocab)
    assert len([name for name in files_below(folder) if "/00000-" in name]) > 3, "in several parts"


def test_a_saved_array_may_be_donated_at_once(checkpoints):
    values = np.arange(1 << 20, dtype=np.float32)
    array = jax.device_put(values, NamedSharding(mesh_of(2, 4), PartitionSpec("data")))
    overwrite = jax.jit(lambda x: -x - 1, donate_argnums=0)
    checkpoints.save(1, {"x": array}, {})
    for _ in range(3):
        array = overwrite(array)
    jax.block_until_ready(array)
    restored = checkpoints.restore(1, {"x": jax.ShapeDtypeStruct(values.shape, values.dtype)})
    np.testing.assert_array_equal(restored.tree["x"], values)


def test_checkpoints_are_found_by_step_also_in_part_and_after_a_move(checkpoints, tmp_path):
    assert (checkpoints.latest(small(0)), checkpoints.steps()) == (None, [])
    metadata = {"tokens": 1}
    checkpoints.save(5, {"params": small(2), "optimizer": small(3)}, metadata)
    metadata["tokens"] = 2
    restored = checkpoints.restore(5, {"params": small(0)}, partial=True)
    assert_same_bits(restored.tree, {"params": small(2)})
    assert restored.metadata == {"tokens": 1}, "as it was when save was called"
    with pytest.raises(UserError, match="also has optimizer/step"):
        checkpoints.restore(5, {"params": small(0)})
    with pytest.raises(UserError, match=r"no checkpoint of step 6 .* there are: 5\."):
        checkpoints.restore(6, small(0))
    checkpoints.close()
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    with Checkpoints(tmp_path / "elsewhere") as moved:
        assert_same_bits(moved.latest({"params": small(0)}, partial=True).tree, {"params": small(2)})


@pytest.mark.quick
def test_a_template_that_does_not_match_names_the_leaves(checkpoints):
    checkpoints.save(5, small(1), {})
    for template, message in (
        ({"weight": jnp.zeros(999), "step": jnp.int32(0)}, r"weight: float32 \[1000\] there, float32 \[999\] here"),
        ({"weight": jnp.zeros(1000, jnp.bfloat16), "step": jnp.int32(0)}, r"float32 \[1000\] there, bfloat16 \[1000\]"),
        ({"weight": jnp.zeros(1000)}, r"also has step \(int32 \[\]\)"),
        (small(0) | {"momentum": jnp.zeros(3)}, r"lacks momentum \(float32 \[3\]\)"),
        (small(0) | {"weight": hax.zeros(Axis("embed", 1000))}, r"there, float32 \[embed=1000\] here"),
    ):
        with pytest.raises(UserError, match=message):
            checkpoints.latest(template)


def test_a_process_that_lost_the_run_deletes_nothing_that_the_new_one_writes(folder, reports):
    def lost() -> None:
        raise UserError("it is being trained by another now")

    other = folder / "step-00000002" / "another"
    other.mkdir(parents=True)
    (other / "00000-00000").write_bytes(b"under way")
    with Checkpoints(folder, report=reports.append, check=lost) as checkpoints:
        checkpoints.save(4, small(4), {})
        assert checkpoints.failure == "it is being trained by another now"
    assert list(files_below(folder)) == ["step-00000002/another/00000-00000"]
    assert reports == [
        "The checkpoint of step 4 could not be saved: it is being trained by another now. There is no earlier one."
    ]


def test_damage_to_any_file_is_reported_and_the_one_before_is_used(folder, reports):
    with Checkpoints(folder, report=reports.append) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, small(step), {"of": step})
        checkpoints.wait()
        assert reports == ["The checkpoint of step 10 is saved.", "The checkpoint of step 20 is saved."]
        newest = folder / "step-00000020"
        found = list(files_below(newest))
        assert sorted(name.rpartition("/")[2] for name in found) == [
            "00000-00000",
            *("leaves.json", "manifest.json", "metadata.json", "shards.json"),
        ]
        for name in found:
            intact = (newest / name).read_bytes()
            truncated, flipped = intact[: len(intact) // 2], bytes([intact[0] ^ 4]) + intact[1:]
            others = [truncated, *([None] if name != MANIFEST else [])]
            for content in (flipped, *(others if isinstance(folder, Path) or name.endswith("00000-00000") else [])):
                (newest / name).unlink() if content is None else (newest / name).write_bytes(content)
                restored = checkpoints.latest(small(0))
                assert (restored.step, restored.metadata) == (10, {"of": 10}), name
                assert_same_bits(restored.tree, small(10))
                assert f"step 20 is damaged ({name}" in reports[-1]
                assert "step 10 is used instead" in reports[-1]
            (newest / name).write_bytes(intact)
        assert checkpoints.latest(small(0)).step == 20


@pytest.mark.quick
def test_what_has_no_manifest_does_not_count_and_goes_with_the_next_save(folder, reports):
    with Checkpoints(folder) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, small(step), {})
    (folder / "step-00000020" / MANIFEST).unlink()
    (folder / "notes").write_bytes(b"of somebody else")
    with Checkpoints(folder, report=reports.append) as again:
        assert again.steps() == [10]
        assert again.latest(small(0)).step == 10
        assert reports[0].startswith("The checkpoint of step 20 is not valid: ")
        assert reports[0].endswith("The newest valid one is that of step 10.")
        again.save(30, small(30), {})
    assert names(folder) == ["notes", "step-00000010", "step-00000030"]


def test_no_sound_checkpoint_is_an_error(checkpoints, tmp_path):
    checkpoints.save(10, small(10), {})
    checkpoints.wait()
    path = tmp_path / "checkpoints" / "step-00000010" / MANIFEST
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"None of the checkpoints .*step-00000010: manifest.json is truncated"):
        checkpoints.latest(small(0))
    with pytest.raises(UserError, match="is damaged"):
        checkpoints.restore(10, small(0))


def test_keeps_the_last_and_the_milestones_and_replaces_what_is_outdated_alone(folder, capfd):
    with Checkpoints(folder, CheckpointConfig(keep_last=2, keep_every=20)) as checkpoints:
        for step in range(10, 60, 10):
            checkpoints.save(step, small(step), {})
        checkpoints.save(50, small(2), {})
        assert_same_bits(checkpoints.latest(small(0)).tree, small(50))
        checkpoints.outdate(50)
        checkpoints.save(50, small(2), {})
        assert_same_bits(checkpoints.latest(small(0)).tree, small(2))
        assert checkpoints.steps() == [20, 40, 50]
    assert names(folder) == [f"step-000000{step}" for step in (20, 40, 50)]
    said = "".join(f"The checkpoint of step {step} is saved.\n" for step in (*range(10, 60, 10), 50))
    assert capfd.readouterr() == (said, ""), "nothing but our own words"


def test_going_on_from_before_a_damaged_one_replaces_it(tmp_path, reports):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, report=lambda _: None) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, small(step), {})
    for step in ("20", "30"):
        damaged = next(
            name for name in files_below(folder) if name.startswith(f"step-000000{step}") and "leaves" in name
        )
        (folder / damaged).unlink()
    with Checkpoints(folder, report=reports.append) as again:
        assert again.latest(small(0)).step == 10
        again.save(20, small(2), {})
        again.wait()
        assert again.steps() == [10, 20]
        assert_same_bits(again.latest(small(0)).tree, small(2))
    assert ["damaged" in report for report in reports] == [True, True, False]
    recorded = json.loads((folder / "step-00000020" / MANIFEST).read_bytes())["files"]
    assert set(files_below(folder / "step-00000020")) == {MANIFEST, *recorded}, "nothing of the damaged one is left"


def test_a_failed_save_is_reported_and_the_next_one_is_none_the_worse(checkpoints, reports, tmp_path):
    checkpoints.save(1, small(1), {})
    checkpoints.save(2, small(2), {}, (tmp_path / "none" / "beside").touch)
    checkpoints.wait()
    assert checkpoints.failure == f"No such file or directory: {tmp_path / 'none' / 'beside'}"
    assert reports[-1].startswith("The checkpoint of step 2 could not be saved: No such file or directory")
    (tmp_path / "checkpoints" / "step-00000003").write_text("a file in the folder's place")
    checkpoints.save(3, small(3), {})
    checkpoints.wait()
    assert (checkpoints.failure, checkpoints.steps()) == (None, [1, 3])
    assert names(tmp_path / "checkpoints") == ["step-00000001", "step-00000003"]


def test_a_full_disk_costs_one_checkpoint(checkpoints, reports, tmp_path):
    """Files have a largest size here: the system refuses to write on, as on a full disk."""
    large = {"weight": jnp.arange(100_000, dtype=jnp.float32), "step": jnp.int32(0)}
    checkpoints.save(1, large, {})
    for most in (100, 10_000):  # at its beginning, in its arrays
        checkpoints.wait()
        with largest_file(most):
            checkpoints.save(2, large, {})
            checkpoints.wait()
        assert checkpoints.failure.startswith("File too large")
        assert checkpoints.failure in reports[-1]
        assert reports[-1].endswith("The newest one is that of step 1.")
        assert names(tmp_path / "checkpoints") == ["step-00000001"], "what was half-written is gone"
    checkpoints.save(2, large, {})
    assert_same_bits(checkpoints.latest(large).tree, large)
    assert (checkpoints.failure, checkpoints.steps()) == (None, [1, 2])


@pytest.mark.quick
def test_a_state_that_is_not_finite_is_never_saved(checkpoints):
    sound = state(7, PartitionSpec("data"), mesh_of(2, 4))
    checkpoints.save(1, sound, {})

    def spoilt(leaf, bad: float):
        is_float = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size
        return leaf.at[-1, -1].set(bad) if is_float and leaf.ndim == 2 else leaf

    for where, bad in (("model", np.nan), ("optimizer", np.inf), ("extras", np.nan)):
        with pytest.raises(UserError, match=rf"After step 2, .* \({where}/.*\), so no checkpoint .* that of step 1\."):
            checkpoints.save(2, {**sound, where: jax.tree.map(partial(spoilt, bad=bad), sound[where])}, {})
        assert checkpoints.steps() == [1]


class Killed(BaseException):
    """Ends a save without the program's own measures against errors."""


@pytest.mark.parametrize("replaces", [False, True])
def test_a_save_that_ends_anywhere_leaves_a_sound_newest_checkpoint(tmp_path, monkeypatch, replaces):
    """Before each change of the disk in turn; the save deletes an older checkpoint, or replaces one of its step."""
    left = [0]

    def counted(owner, name: str) -> None:
        original = getattr(owner, name)

        def call(*args, **options):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((os, "fsync"), (os, "replace"), (shutil, "rmtree"), (Path, "unlink"), (Path, "mkdir")):
        counted(owner, name)
    step, content, killed_at = 1, 1, []
    with Checkpoints(tmp_path, report=lambda _: None) as checkpoints:
        checkpoints.save(step, small(content), {})
    while left[0] <= 0:
        with Checkpoints(tmp_path, CheckpointConfig(keep_last=1), lambda _: None) as checkpoints:
            restored = checkpoints.latest(small(0))
            checkpoints.outdate(restored.step)
            left[0] = len(killed_at) + 1
            with suppress(Killed):
                checkpoints.save(step + (not replaces), small(content + 1), {})
                checkpoints.wait()
        killed_at.append(left[0])
        reports: list[str] = []
        with Checkpoints(tmp_path, report=reports.append) as again:
            restored = again.latest(small(0))
        assert all("is not valid" in report for report in reports)
        assert restored.step in (step, step + (not replaces))
        found = int(restored.tree["step"])
        assert found in (content, content + 1)
        assert_same_bits(restored.tree, small(found))
        step, content = restored.step, found
    assert len(killed_at) > 10


@pytest.mark.quick
def test_all_of_it_is_on_the_disk_before_it_counts(tmp_path, reports, monkeypatch):
    settled: list[Path] = []
    fsync, replace = os.fsync, os.replace

    def waited(file: int) -> None:
        settled.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    monkeypatch.setattr(os, "fsync", waited)

    def named(before, after) -> None:
        assert Path(after).name == MANIFEST
        there = {tmp_path, *tmp_path.rglob("*")}
        assert not there - set(settled), "power may fail now, and older ones go next"
        replace(before, after)

    monkeypatch.setattr(os, "replace", named)
    with Checkpoints(tmp_path, CheckpointConfig(), reports.append) as checkpoints:
        checkpoints.save(1, small(1), {})
    assert settled[-1] == tmp_path / "step-00000001"
    assert reports == ["The checkpoint of step 1 is saved."]


def test_a_store_that_fails_costs_one_checkpoint(s3, s3_endpoint, monkeypatch, reports):
    with proxied(s3_endpoint) as (endpoint, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        folder = storage_path(str(s3), RetryPolicy(seconds=0.3, first_delay_seconds=0.05))
        with Checkpoints(folder, report=reports.append) as checkpoints:
            checkpoints.save(1, small(1), {})
            for step, where in enumerate(("leaves.json", "00000-00000", MANIFEST), 2):
                checkpoints.wait()
                proxy.faults[:] = [Fault(503, 1000, "PUT", where)]
                checkpoints.save(step, small(step), {})
                checkpoints.wait()
                assert "the store did not answer as it should for 0.3 s" in checkpoints.failure
                assert reports[-1].startswith(
                    f"The checkpoint of step {step} could not be saved: {s3}/step-0000000{step}/"
                )
                assert reports[-1].endswith(f"The newest one is that of step {step - 1}.")
                assert checkpoints.steps() == [*range(max(step - 3, 1), step)]
                proxy.faults[:] = [Fault(500, 1, "PUT", where)]
                checkpoints.save(step, small(step), {})
                assert_same_bits(checkpoints.latest(small(0)).tree, small(step))
                assert checkpoints.failure is None
            proxy.faults[:] = [Fault("expired", 1000)]
            with pytest.raises(UserError, match=r"the store refused access .*token has expired"):
                checkpoints.latest(small(0))
            proxy.faults.clear()


def test_a_disk_that_cannot_read_a_file_has_a_damaged_checkpoint(checkpoints, reports, monkeypatch):
    for step in (1, 2):
        checkpoints.save(step, small(step), {})
    checkpoints.wait()
    measured = manifest.measured

    def broken(path: Path, number: int) -> tuple[int, str]:
        if path.name == "00000-00000" and "step-00000002" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return measured(path)

    monkeypatch.setattr(manifest, "measured", partial(broken, number=errno.EIO))
    assert checkpoints.latest(small(0)).step == 1
    assert re.search(r"step 2 is damaged \(\w+/00000-00000 cannot be read: Input/output error in", reports[-1])
    monkeypatch.setattr(manifest, "measured", partial(broken, number=errno.EACCES))
    with pytest.raises(UserError, match=r"The checkpoint of step 2 cannot be read: Permission denied: .*00000-00000"):
        checkpoints.latest(small(0))


def test_only_the_rows_of_a_piece_that_are_asked_for_are_read():
    piece = ShardExtent(Region((4, 8), (4, 8)), process=3, offset=100)
    wanted = [Region((0, 0), (5, 9)), Region((6, 10), (1, 1))]
    assert list(rows_for(piece, wanted, item_bytes=2)) == [RowRange(Region((4, 8), (3, 8)), 3, 100, 100 + 3 * 8 * 2)]
    assert list(rows_for(piece, wanted, item_bytes=2, max_bytes=40)) == [
        RowRange(Region((4, 8), (2, 8)), 3, 100, 132),
        RowRange(Region((6, 8), (1, 8)), 3, 132, 148),
    ]
    assert list(rows_for(piece, [Region((0, 0), (4, 99))], item_bytes=2)) == []
    assert list(rows_for(ShardExtent(Region((), ()), 0, 7), [Region((), ())], 4)) == [
        RowRange(Region((), ()), 0, 7, 11)
    ]
