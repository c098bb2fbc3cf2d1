"""Compiled programs in a store: found by other hosts, and never the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from gregale.errors import UserError
from gregale.services import compiled, compiled_store
from gregale.services.compiled import FOLDER, keep_compiled, processor
from gregale.services.config import TrainConfig
from gregale.storage import Patience
from tests.anew import as_a_process_begins, cache_events


@pytest.fixture
def events() -> Iterator[list[str]]:
    """What JAX tells of its cache."""
    with cache_events() as seen:
        yield seen


@pytest.fixture
def on_host(tmp_path, monkeypatch, events):
    """`on_host(name, place)`: what happens on a host that compiles a program, in the words of JAX; its folder."""

    def run(name: str, place: str) -> tuple[list[str], Path]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        with as_a_process_begins():
            keep_compiled(place)
            jax.clear_caches()
            x = jnp.arange(12.0).reshape(3, 4)
            events.clear()
            jax.block_until_ready(jax.jit(program)(x))
            if (mirror := compiled_store._MIRRORS.get(getattr(jax.config, FOLDER))) is not None:
                mirror.wait()
        return list(events), tmp_path / name / "gregale" / f"compiled-{processor()}"

    return run


def program(x):
    return jnp.sin(x) @ jnp.cos(x).T + 2 / x.sum()


def test_another_host_finds_it_in_the_store(s3, on_host):
    found, folder = on_host("first", str(s3))
    assert found == ["cache_misses"]
    names = {path.name for path in folder.iterdir()}
    assert set((s3 / folder.name).files_below()) == names, "all of it is in the store"
    found, folder = on_host("second", str(s3))
    assert found == ["cache_hits"]
    assert {path.name for path in folder.iterdir()} <= names, "what it asked for, and nothing half-written"
    assert on_host("second", str(s3))[0] == ["cache_hits"]


def test_a_damaged_one_is_compiled_and_written_over(s3, on_host):
    _, folder = on_host("first", str(s3))
    (name,) = (name for name in (s3 / folder.name).files_below() if name.startswith("jit_program-"))
    (s3 / folder.name / name).write_bytes(b"not a program")
    assert on_host("second", str(s3))[0] == ["cache_misses"]
    assert on_host("third", str(s3))[0] == ["cache_hits"]


def test_a_store_that_is_away_is_said_once(s3, on_host, monkeypatch, capfd):
    monkeypatch.setattr(compiled, "STORE_PATIENCE", Patience(0.3, 0.3, 0.05))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert on_host("first", str(s3))[0] == ["cache_misses"]
    said = capfd.readouterr().err
    assert said.startswith("gregale: compilation_cache: s3://")
    assert said.count("\n") == said.count("Until the next start, what is compiled is kept in") == 1
    assert on_host("first", str(s3))[0] == ["cache_hits"], "the folder has it"


def test_a_bucket_that_does_not_exist_is_no_end(s3, on_host, capfd):
    assert on_host("first", "s3://nobody-made-this/programs")[0] == ["cache_misses"]
    assert "there is no bucket s3://nobody-made-this" in capfd.readouterr().err


@pytest.mark.parametrize(("url", "words"), [("ftp://host/programs", "ftp:// is not a store"), ("gs://", "no bucket")])
def test_what_is_no_store_is_refused(url, words):
    with pytest.raises(UserError, match=rf"compilation_cache is '{url}'\..*{words}"):
        TrainConfig(name="a", steps=1, compilation_cache=url)
