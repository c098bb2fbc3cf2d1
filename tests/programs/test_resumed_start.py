"""A run that goes on on another host compiles nothing: all of its programs are in the store."""

from __future__ import annotations

import shutil
from collections import Counter

import jax

from tests.anew import as_a_process_begins
from tests.programs.tiny import EVALUATE, assert_same_state, checkpoint_steps, losses


def test_a_resumed_run_compiles_nothing(gregale, inputs, whole, s3, tmp_path, monkeypatch):
    found: Counter[str] = Counter()
    run = inputs / "runs" / "moved"

    def listen(event: str, **_: object) -> None:
        found[event.rpartition("/")[2]] += 1

    def start(host: str) -> None:
        """As on a host of its own, whose folder is empty and whose process has compiled nothing."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / host))
        found.clear()
        with as_a_process_begins():
            jax.clear_caches()
            given = [*EVALUATE, "--name", "moved", "--compilation_cache", str(s3)]
            assert gregale("train", "tiny.yaml", *given) == 0

    jax.monitoring.register_event_listener(listen)
    try:
        start("first")
        assert found["cache_misses"] >= 8
        shutil.rmtree(run / "checkpoints" / "step-00000012")
        start("second")
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert found["cache_hits"] >= 8
    assert found["cache_misses"] == 0
    assert checkpoint_steps(run)[-1] == 12
    assert losses(run) == losses(whole)
    assert_same_state(run, whole, 12)
