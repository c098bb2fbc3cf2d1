"""Checkpoints come back as they were, on any mesh, and say so when they cannot."""

import json
import os
import signal
import subprocess
import sys
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

from gregale.errors import UserError
from gregale.services.checkpoint import CheckpointConfig
from gregale.services.checkpoint.manifest import MANIFEST
from gregale.services.checkpoint.store import Checkpoints
from tests.disk import largest_file

Embed, Vocab = Axis("embed", 16), Axis("vocab", 24)


class Linear(eqx.Module):
    weight: NamedArray
    name: str = eqx.field(static=True)
    activation: object


def mesh_of(replica: int, data: int) -> jax.sharding.Mesh:
    devices = np.asarray(jax.devices()[: replica * data]).reshape(replica, data)
    return jax.sharding.Mesh(devices, ("replica", "data"))


def state(seed: int, spec: PartitionSpec, mesh: jax.sharding.Mesh) -> dict:
    """A tree with all kinds of leaves: named, optimizer state, scalars, small floats, keys, empty arrays."""
    sharded, everywhere = NamedSharding(mesh, spec), NamedSharding(mesh, PartitionSpec())
    key = jax.random.key(seed)
    weight = jax.device_put(jax.random.normal(key, (Embed.size, Vocab.size)), sharded)
    model = Linear(hax.named(weight, (Embed, Vocab)), "a name", jax.nn.relu)
    params = eqx.filter(model, eqx.is_array)
    optimizer = jax.tree.map(lambda x: jax.device_put(x, everywhere), optax.adam(1e-3).init(params))
    extras = (jnp.int32(seed), weight.astype(jnp.bfloat16), key, jnp.zeros((0, 3)), (weight > 0), jnp.int8([1, -seed]))
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
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def small(step: int) -> dict:
    return {"weight": jnp.arange(1000, dtype=jnp.float32) * step, "step": jnp.int32(step)}


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def checkpoints(tmp_path, reports):
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig(keep_last=3), reports.append) as opened:
        yield opened


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (PartitionSpec("data", "replica"), (2, 4)),
        (PartitionSpec(("data", "replica")), (4, 2)),
        (PartitionSpec("replica"), (8, 1)),
        (PartitionSpec(), (1, 1)),
    ],
)
def test_restores_under_another_mesh(checkpoints, spec, shape):
    saved = state(7, PartitionSpec("data"), mesh_of(2, 4))
    checkpoints.save(30, saved, {"tokens": 12, "config": {"name": "x"}})
    restored = checkpoints.latest(template_of(saved, spec, mesh_of(*shape)))
    assert restored.step == 30
    assert restored.metadata == checkpoints.metadata(30) == {"tokens": 12, "config": {"name": "x"}}
    assert_same_bits(restored.tree, saved)
    assert restored.tree["model"].weight.array.sharding == NamedSharding(mesh_of(*shape), spec)
    assert restored.tree["model"].weight.axes == (Embed, Vocab)


@pytest.mark.parametrize("where", ["tmp_path", "s3"])
def test_a_saved_array_may_be_donated_at_once(where, request):
    values = np.arange(1 << 20, dtype=np.float32)
    array = jax.device_put(values, NamedSharding(mesh_of(2, 4), PartitionSpec("data")))
    overwrite = jax.jit(lambda x: -x - 1, donate_argnums=0)
    with Checkpoints(request.getfixturevalue(where) / "checkpoints") as checkpoints:
        checkpoints.save(1, {"x": array}, {})
        for _ in range(3):
            array = overwrite(array)
        jax.block_until_ready(array)
        restored = checkpoints.restore(1, {"x": jax.ShapeDtypeStruct(values.shape, values.dtype)})
    np.testing.assert_array_equal(restored.tree["x"], values)


def test_the_directory_may_be_moved(checkpoints, tmp_path):
    checkpoints.save(1, small(3), {})
    checkpoints.close()
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    with Checkpoints(tmp_path / "elsewhere") as moved:
        assert_same_bits(moved.latest(small(0)).tree, small(3))


def test_a_directory_without_checkpoints_gives_none(checkpoints):
    assert checkpoints.latest(small(0)) is None
    assert checkpoints.steps() == []


def test_a_part_of_a_checkpoint_is_restored_on_request(checkpoints):
    checkpoints.save(5, {"params": small(2), "optimizer": small(3)}, {})
    restored = checkpoints.restore(5, {"params": small(0)}, partial=True)
    assert_same_bits(restored.tree, {"params": small(2)})
    with pytest.raises(UserError, match="also has optimizer/step"):
        checkpoints.restore(5, {"params": small(0)})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"weight": jnp.zeros(999), "step": jnp.int32(0)}, r"weight: float32 \[1000\] there, float32 \[999\] here"),
        ({"weight": jnp.zeros(1000, jnp.bfloat16), "step": jnp.int32(0)}, r"float32 \[1000\] there, bfloat16 \[1000\]"),
        ({"weight": jnp.zeros(1000)}, r"also has step \(int32 \[\]\)"),
        (small(0) | {"momentum": jnp.zeros(3)}, r"lacks momentum \(float32 \[3\]\)"),
        (small(0) | {"weight": hax.zeros(Axis("embed", 1000))}, r"there, float32 \[embed=1000\] here"),
    ],
)
def test_a_template_that_does_not_match_names_the_leaves(checkpoints, template, message):
    checkpoints.save(5, small(1), {})
    with pytest.raises(UserError, match=message):
        checkpoints.latest(template)


def test_an_absent_step_lists_those_there_are(checkpoints):
    checkpoints.save(5, small(5), {})
    checkpoints.wait()
    with pytest.raises(UserError, match=r"no checkpoint of step 6 .* there are: 5\."):
        checkpoints.restore(6, small(0))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


DAMAGES = {"truncated": truncate, "flipped bit": flip_a_bit, "missing": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_to_any_file_is_reported_and_the_one_before_is_used(checkpoints, reports, damage, tmp_path):
    for step in (10, 20):
        checkpoints.save(step, small(step), {"of": step})
    checkpoints.wait()
    assert reports == ["The checkpoint of step 10 is saved.", "The checkpoint of step 20 is saved."]
    newest = tmp_path / "checkpoints" / "step-00000020"
    files = [path for path in newest.rglob("*") if path.is_file() and path.stat().st_size > 1]
    assert len(files) >= 8
    for path in files:
        intact = path.read_bytes()
        damage(path)
        restored = checkpoints.latest(small(0))
        path.write_bytes(intact)
        assert (restored.step, restored.metadata) == (10, {"of": 10}), path
        assert_same_bits(restored.tree, small(10))
        assert "step 20 is damaged" in reports[-1]
        assert path.name in reports[-1] or MANIFEST in reports[-1]
        assert "step 10 is used instead" in reports[-1]
    assert len(reports) == 2 + len(files)
    assert checkpoints.latest(small(0)).step == 20


def test_no_sound_checkpoint_is_an_error(checkpoints, tmp_path):
    checkpoints.save(10, small(10), {})
    checkpoints.wait()
    truncate(tmp_path / "checkpoints" / "step-00000010" / MANIFEST)
    with pytest.raises(UserError, match=r"None of the checkpoints .*step-00000010: manifest.json is truncated"):
        checkpoints.latest(small(0))
    with pytest.raises(UserError, match="is damaged"):
        checkpoints.restore(10, small(0))


def test_keeps_the_last_and_the_milestones(tmp_path):
    with Checkpoints(tmp_path, CheckpointConfig(keep_last=2, keep_every=30)) as checkpoints:
        for step in range(10, 100, 10):
            checkpoints.save(step, small(step), {})
        checkpoints.wait()
        assert checkpoints.steps() == [30, 60, 80, 90]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-000000{step}" for step in (30, 60, 80, 90)]


def test_going_on_from_before_a_damaged_one_replaces_it(checkpoints, reports, tmp_path):
    for step in (10, 20, 30):
        checkpoints.save(step, small(step), {})
    checkpoints.wait()
    for step in (20, 30):
        flip_a_bit(tmp_path / "checkpoints" / f"step-000000{step}" / "leaves.json")
    reports.clear()
    with Checkpoints(tmp_path / "checkpoints", report=reports.append) as again:
        assert again.latest(small(0)).step == 10
        again.save(20, small(2), {})
        again.wait()
        assert again.steps() == [10, 20]
        assert_same_bits(again.latest(small(0)).tree, small(2))
    assert ["damaged" in report for report in reports] == [True, True, False]


def test_an_unfinished_checkpoint_is_never_read_and_is_cleaned(checkpoints, tmp_path):
    directory = tmp_path / "checkpoints"
    checkpoints.save(10, small(10), {})
    checkpoints.wait()
    for name in ("step-00000020.partial", "step-00000005.deleted"):
        (directory / name).mkdir()
        (directory / name / MANIFEST).write_text("{}")
    (directory / "notes").mkdir()
    with Checkpoints(directory) as again:
        assert again.latest(small(0)).step == 10
        again.save(20, small(20), {})
        again.wait()
    assert sorted(path.name for path in directory.iterdir()) == ["notes", "step-00000010", "step-00000020"]


def test_metadata_is_taken_when_save_is_called(checkpoints):
    metadata = {"tokens": 1}
    checkpoints.save(1, small(1), metadata)
    metadata["tokens"] = 2
    checkpoints.wait()
    assert checkpoints.metadata(1) == {"tokens": 1}


def test_a_failed_save_is_reported_and_the_next_one_is_none_the_worse(checkpoints, reports, tmp_path):
    checkpoints.save(1, small(1), {})
    checkpoints.save(2, small(2), {}, (tmp_path / "none" / "beside").touch)
    checkpoints.wait()
    assert checkpoints.failure == f"No such file or directory: {tmp_path / 'none' / 'beside'}"
    assert reports[-1].startswith("The checkpoint of step 2 could not be saved: No such file or directory")
    checkpoints.save(3, small(3), {})
    checkpoints.wait()
    assert checkpoints.failure is None
    assert checkpoints.steps() == [1, 3]


def test_what_has_the_name_of_a_checkpoint_makes_room_for_one(checkpoints, tmp_path):
    file = tmp_path / "checkpoints" / "step-00000002"
    file.parent.mkdir()
    file.write_text("a file in the folder's place")
    checkpoints.save(2, small(2), {})
    checkpoints.wait()
    assert checkpoints.failure is None
    assert [path.name for path in file.parent.iterdir()] == ["step-00000002"]
    assert_same_bits(checkpoints.latest(small(0)).tree, small(2))


@pytest.mark.parametrize("most", [100, 10_000], ids=["at its beginning", "in its arrays"])
def test_a_full_disk_costs_one_checkpoint(checkpoints, reports, tmp_path, most, caplog):
    """Files have a largest size here: the system refuses to write on, as on a full disk."""
    directory = tmp_path / "checkpoints"
    large = {"weight": jnp.arange(100_000, dtype=jnp.float32), "step": jnp.int32(0)}
    checkpoints.save(1, large, {})
    checkpoints.wait()
    with largest_file(most):
        checkpoints.save(2, large, {})
        checkpoints.wait()
    assert checkpoints.failure.startswith("File too large")
    assert checkpoints.failure in reports[-1]
    assert reports[-1].endswith("The newest one is that of step 1.")
    assert [path.name for path in directory.iterdir()] == ["step-00000001"], "what was half-written is gone"
    assert not caplog.records, "Orbax says nothing beside"
    checkpoints.save(2, large, {})
    assert_same_bits(checkpoints.latest(large).tree, large)
    assert (checkpoints.failure, checkpoints.steps()) == (None, [1, 2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["model", "optimizer", "extras"])
def test_a_state_that_is_not_finite_is_never_saved(checkpoints, bad, where):
    sound = state(7, PartitionSpec("data"), mesh_of(2, 4))
    checkpoints.save(1, sound, {})

    def spoilt(leaf):
        is_float = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size
        return leaf.at[-1, -1].set(bad) if is_float and leaf.ndim == 2 else leaf

    with pytest.raises(UserError, match=rf"After step 2, .* \({where}/.*\), so no checkpoint .* that of step 1\."):
        checkpoints.save(2, {**sound, where: jax.tree.map(spoilt, sound[where])}, {})
    checkpoints.wait()
    assert checkpoints.steps() == [1]


@pytest.mark.parametrize("field", ["every", "keep_last", "keep_every"])
def test_numbers_must_be_positive(field):
    with pytest.raises(UserError, match=rf"{field} is 0"):
        CheckpointConfig(**{field: 0})


SAVE_FOR_EVER = """
import sys
import jax.numpy as jnp
from gregale.services.checkpoint import CheckpointConfig
from gregale.services.checkpoint.store import Checkpoints
from tests_of_checkpoints import made_for

checkpoints = Checkpoints(sys.argv[1], CheckpointConfig(keep_last=2), report=lambda message: None)
restored = checkpoints.latest(made_for(0))
step = 1 if restored is None else restored.step + 1
while True:
    checkpoints.save(step, made_for(step), {"step": step})
    print(step, flush=True)
    step += 1
"""

MADE_FOR = """
import jax

def made_for(step):
    keys = jax.random.split(jax.random.key(step), 4)
    return [jax.random.normal(key, (50_000,)) for key in keys]
"""


def test_kill_at_any_moment_leaves_a_sound_newest_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "tests_of_checkpoints.py").write_text(MADE_FOR)
    monkeypatch.syspath_prepend(tmp_path)
    from tests_of_checkpoints import made_for

    directory = tmp_path / "checkpoints"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    random = np.random.default_rng(0)
    newest = 0
    for _ in range(3):
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(directory)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(random.integers(1, 4)):
                assert process.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(float(random.uniform(0, 0.1)))
            process.send_signal(signal.SIGKILL)
        reports: list[str] = []
        with Checkpoints(directory, report=reports.append) as checkpoints:
            restored = checkpoints.latest(made_for(0))
        assert not reports
        if restored is not None:
            assert restored.metadata == {"step": restored.step}
            assert_same_bits(restored.tree, made_for(restored.step))
            assert restored.step >= newest
            newest = restored.step
    assert newest > 0


def test_nothing_but_our_own_words_reaches_the_screen(tmp_path):
    program = (
        "import sys, jax.numpy as jnp\n"
        "from gregale.services.checkpoint.store import Checkpoints\n"
        "with Checkpoints(sys.argv[1]) as c:\n"
        "    c.save(1, {'a': jnp.ones(3)}, {})\n"
        "    c.restore(1, {'a': jnp.ones(3)})\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("The checkpoint of step 1 is saved.\n", "")


def test_the_manifest_covers_every_file(checkpoints, tmp_path):
    checkpoints.save(1, small(1), {})
    checkpoints.wait()
    folder = tmp_path / "checkpoints" / "step-00000001"
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(json.loads((folder / MANIFEST).read_text())["files"]) == there - {MANIFEST}


def test_all_of_it_is_on_the_disk_before_it_counts(tmp_path, reports, monkeypatch):
    settled: list[Path] = []
    fsync, rename = os.fsync, os.rename

    def waited(file: int) -> None:
        settled.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    monkeypatch.setattr(os, "fsync", waited)

    def named(before, after) -> None:
        there = {Path(before), *Path(before).rglob("*")} if Path(after).name == "step-00000001" else set()
        assert not there - set(settled), "power may fail now, and older ones go next"
        rename(before, after)

    monkeypatch.setattr(os, "rename", named)
    with Checkpoints(tmp_path, CheckpointConfig(), reports.append) as checkpoints:
        checkpoints.save(1, small(1), {})
    assert settled[-1] == tmp_path
    assert (tmp_path / "step-00000001.partial" / MANIFEST) in settled


@pytest.mark.parametrize("where", ["tmp_path", "s3"])
def test_what_is_outdated_is_replaced_and_nothing_else_is(where, request, reports):
    with Checkpoints(request.getfixturevalue(where) / "checkpoints", CheckpointConfig(), reports.append) as checkpoints:
        checkpoints.save(1, small(1), {})
        checkpoints.save(1, small(2), {})
        assert_same_bits(checkpoints.latest(small(0)).tree, small(1))
        checkpoints.outdate(1)
        checkpoints.save(1, small(2), {})
        checkpoints.wait()
        assert_same_bits(checkpoints.latest(small(0)).tree, small(2))
        assert checkpoints.steps() == [1]
    assert reports == ["The checkpoint of step 1 is saved."] * 2
