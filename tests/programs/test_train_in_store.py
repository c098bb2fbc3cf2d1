"""Runs in a store: the same bits as on a disk, every command reads them, and another host compiles nothing."""

from collections import Counter

from tests.anew import as_a_process_begins, cache_events
from tests.programs.tiny import EVALUATE, assert_same_state, checkpoint_steps, lines, losses
from tests.stores import BUCKET, CREDENTIALS, Fault, proxied

PARTS = ("checkpoints", "metrics.jsonl", "samples.txt")  # what a run writes while it trains
LOST = (
    "The checkpoint of step 12 is not valid: {}/checkpoints/step-00000012 has no manifest.json, which a save writes "
    "last. The newest valid one is that of step 8.\n"
)


def test_a_run_in_a_store_is_the_run_on_a_disk(s3, gregale, whole, traced_programs, capsys, tmp_path, monkeypatch):
    run, found = s3 / "whole", Counter()
    options = ["--name", "whole", *EVALUATE, "--runs", s3, "--compilation_cache", s3 / "compiled"]

    def train_on(host: str) -> None:
        """As on a host of its own, whose folder is empty and whose process has compiled nothing."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / host))
        found.clear()
        traced_programs.clear()
        with as_a_process_begins(), cache_events() as events:
            assert gregale("train", "tiny.yaml", *options) == 0
        found.update(events)

    train_on("first")
    assert found["cache_misses"] >= 4
    assert checkpoint_steps(run) == [4, 8, 12]
    assert_same_state(run, whole, 12)
    assert losses(run) == losses(whole)
    (run / "checkpoints" / "step-00000012" / "manifest.json").unlink()
    capsys.readouterr()
    assert gregale("sample", run, "the", "--tokens", 3) == 0
    assert LOST.format(run) in capsys.readouterr().err
    train_on("second")
    assert found["cache_hits"] >= 4
    assert found["cache_misses"] == 0, "all of its programs are in the store"
    out = capsys.readouterr().out
    assert "Going on after step 8 of 12." in out
    assert LOST.format(run) in out
    assert "is gone" not in out
    assert_same_state(run, whole, 12)
    assert losses(run) == losses(whole)
    assert lines(run)[-1]["eval_loss"] == lines(whole)[-1]["eval_loss"]
    assert len((run / "starts.jsonl").read_bytes().splitlines()) == 2
    assert not (run / "lock").exists()

    assert gregale("eval", run) == 0
    assert f"{run} at step 12: " in capsys.readouterr().out
    assert gregale("train", "tiny.yaml", *options, "--seed", 1) == 2
    assert f"{run} holds a run that cannot go on with this configuration: seed 0 -> 1" in capsys.readouterr().err


def test_a_store_that_refuses_is_explained_once(gregale, s3_endpoint, capsys, monkeypatch):
    with proxied(s3_endpoint) as (endpoint, proxy):
        for name, value in {"AWS_ENDPOINT_URL": endpoint, **CREDENTIALS}.items():
            monkeypatch.setenv(name, value)
        run = f"s3://{BUCKET}/refused/tiny"
        proxy.faults[:] = [Fault("denied", 10_000, "PUT", f"{run.removeprefix('s3:/')}/{part}") for part in PARTS]
        assert gregale("train", "tiny.yaml", "--runs", f"s3://{BUCKET}/refused") == 2
    captured = capsys.readouterr()
    assert captured.out.count("could not be saved: s3://bucket/refused/tiny/checkpoints/step-000000") == 3
    assert captured.out.count("the store refused access (AccessDenied: Access Denied). There is no earlier one.") == 3
    assert captured.err.count("The credentials come from") == 1
    assert "The credentials come from" not in captured.out


def test_a_wrong_url_is_one_line(s3, refusal):
    nowhere = "s3://nowhere/x/tiny/starts.jsonl: there is no bucket s3://nowhere. Make it, or correct the name."
    assert nowhere in refusal("train", "tiny.yaml", "--runs", "s3://nowhere/x")
    assert "ftp://x: ftp:// is not a store that is known" in refusal("train", "tiny.yaml", "--runs", "ftp://x")
    missing = f"{s3}/none is not a run directory: there is no object {s3}/none/config.yaml."
    assert missing in refusal("eval", s3 / "none")
