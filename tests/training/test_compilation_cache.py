"""Programs kept compiled, on a disk or in a store: found again by the next start, and never the end of a run."""

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from gregale.errors import UserError
from gregale.runs.config import TrainConfig
from gregale.storage import RetryPolicy
from gregale.training import compiler
from gregale.training.compiler import FOLDER, keep_compiled, processor, user_cache
from tests.anew import as_a_process_begins, cache_events
from tests.disk import largest_file


@pytest.fixture(autouse=True)
def start_anew() -> Iterator[None]:
    with as_a_process_begins():
        yield


@pytest.fixture(scope="module")
def events() -> Iterator[list[str]]:
    """What JAX tells of its cache."""
    with cache_events() as seen:
        yield seen


def answer(events: list[str]) -> tuple[bytes, list[str]]:
    """The bits that a program makes which this process has not compiled yet, and what its compilation did."""

    def program(x):
        return jnp.sin(x) @ jnp.cos(x).T + 1 / x.sum()

    events.clear()
    x = jnp.arange(12.0).reshape(3, 4)
    events.clear()
    jax.clear_caches()
    return jax.jit(program)(x).tobytes(), list(events)


def folder(base: Path) -> Path:
    return base / f"compiled-{processor()}"


def programs(base: Path) -> list[Path]:
    return sorted(folder(base).glob("jit_program-*-cache"))


def test_the_next_start_finds_the_same_program(tmp_path, events):
    expected, _ = answer(events)
    keep_compiled(str(tmp_path))
    assert answer(events) == (expected, ["cache_misses"])
    assert len(programs(tmp_path)) == 1
    assert answer(events) == (expected, ["cache_hits"])


@pytest.mark.parametrize("spoil", [lambda content: content[:100], lambda content: b"", lambda content: content[::-1]])
def test_a_damaged_program_is_compiled_and_kept_again(tmp_path, events, recwarn, spoil):
    keep_compiled(str(tmp_path))
    expected, _ = answer(events)
    (path,) = programs(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    assert answer(events) == (expected, ["cache_misses"])
    assert answer(events) == (expected, ["cache_hits"])
    assert not recwarn.list


def test_a_full_disk_takes_nothing_and_leaves_nothing_as_a_folder_that_vanishes(tmp_path, events, recwarn):
    keep_compiled(str(tmp_path))
    with largest_file(100):
        expected, _ = answer(events)
    assert programs(tmp_path) == []
    assert answer(events) == (expected, ["cache_misses"])
    assert len(programs(tmp_path)) == 1
    shutil.rmtree(folder(tmp_path))
    assert answer(events)[1] == ["cache_misses"]
    assert not recwarn.list


@pytest.mark.parametrize("place", ["/dev/null/compiled", "/proc/compiled", "x" * 300])
def test_a_folder_that_cannot_be_is_no_error(place, events, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keep_compiled(place)
    assert getattr(jax.config, FOLDER) is None
    assert answer(events)[1] == []


@pytest.mark.parametrize(
    ("function", "stand_in"), [("access", lambda path, mode: mode != os.W_OK), ("getuid", lambda: 12345)]
)
def test_a_folder_that_cannot_be_written_to_or_is_another_users_is_not_used(tmp_path, monkeypatch, function, stand_in):
    monkeypatch.setattr(os, function, stand_in)
    keep_compiled(str(tmp_path))
    assert getattr(jax.config, FOLDER) is None


def test_nothing_is_kept_where_nothing_is_to_be_and_a_folder_that_jax_was_given_is_left_to_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled(None)
    assert getattr(jax.config, FOLDER) is None
    assert list(tmp_path.iterdir()) == []
    jax.config.update(FOLDER, str(tmp_path / "mine"))
    keep_compiled(str(tmp_path / "other"))
    assert getattr(jax.config, FOLDER) == str(tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


def test_where_the_users_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert user_cache() == tmp_path / ".cache" / "gregale"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_cache() == tmp_path / "xdg" / "gregale"
    keep_compiled("auto")
    assert Path(getattr(jax.config, FOLDER)) == folder(tmp_path / "xdg" / "gregale")


def test_another_processor_has_programs_of_its_own(monkeypatch):
    here = processor()
    assert here == processor()
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "processor : 0\nflags\t\t: fpu sse avx512f\nbugs : none\n")
    other = processor()
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "processor : 1\nflags\t\t: fpu sse\nbugs : none\n")
    assert len({here, other, processor()}) == 3


def test_what_was_not_used_for_longest_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_BYTES", 250)
    for machine, name, used in (("1", "a", 30), ("1", "b", 10), ("2", "c", 20), ("2", "d", 40)):
        path = tmp_path / f"compiled-{machine}" / f"jit_{name}-0-cache"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 100)
        os.utime(path, (used, used))
    other = tmp_path / "text-cache"
    other.write_bytes(b"x" * 1000)
    keep_compiled(str(tmp_path))
    assert sorted(path.name[4] for path in tmp_path.glob("compiled-?/*")) == ["a", "d"]
    assert other.exists()


@pytest.mark.parametrize("store", ["s3", "gs"])
def test_another_host_finds_it_in_the_store(store, request, events, tmp_path, monkeypatch):
    url = request.getfixturevalue(store)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for did in ("cache_misses", "cache_hits"):
        with as_a_process_begins():
            keep_compiled(str(url))
            assert answer(events)[1] == [did]
    assert programs(tmp_path / "gregale") == [], "all of it is in the store"


def test_a_damaged_one_in_the_store_is_compiled_and_written_anew(s3, events, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled(str(s3))
    answer(events)
    (name,) = (name for name in s3.files_below() if "jit_program-" in name)
    (s3 / name).write_bytes(b"not a program")
    assert [answer(events)[1] for _ in range(2)] == [["cache_misses"], ["cache_hits"]]
    assert capfd.readouterr().err == ""


def test_a_store_that_is_away_is_said_once(s3, events, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "STORE_RETRIES", RetryPolicy(0.3, 0.3, 0.05))
    with as_a_process_begins():
        keep_compiled("s3://nobody-made-this/programs")
        assert "there is no bucket s3://nobody-made-this" in capfd.readouterr().err
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    keep_compiled(str(s3))
    assert [answer(events)[1] for _ in range(2)] == [["cache_misses"], ["cache_hits"]], "the folder has it"
    said = capfd.readouterr().err
    assert said.startswith("gregale: compilation_cache: s3://")
    assert said.count("\n") == said.count("Until the next start, compiled programs are kept in") == 1


def test_a_store_that_fails_later_is_left_for_the_folder(s3, events, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "STORE_RETRIES", RetryPolicy(0.3, 0.3, 0.05))
    keep_compiled(str(s3))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    warnings.warn("Error reading persistent compilation cache entry for 'jit_a': out of order", stacklevel=1)
    assert [answer(events)[1] for _ in range(2)] == [["cache_misses"], ["cache_hits"]]
    assert capfd.readouterr().err.count("Until the next start, compiled programs are kept in") == 1
    assert len(programs(tmp_path / "gregale")) == 1


@pytest.mark.parametrize(("url", "words"), [("ftp://host/programs", "ftp:// is not a store"), ("gs://", "no bucket")])
def test_what_is_no_store_is_refused(url, words):
    with pytest.raises(UserError, match=rf"compilation_cache is '{url}'\..*{words}"):
        TrainConfig(name="a", steps=1, compilation_cache=url)
