"""rounds.jsonl, on a disk and in a store."""

from __future__ import annotations

import json

import pytest

from gregale.programs.island.loop import Recorder
from gregale.runs.history import ROUNDS
from gregale.storage import write_bytes
from gregale.storage.jsonl_reader import read_entries
from tests.stores import Fault, proxied


def rounds_of(run):
    return read_entries(run / ROUNDS, number="round").entries


@pytest.fixture(params=["tmp_path", "s3"])
def run(request):
    return request.getfixturevalue(request.param)


def test_rounds_after_the_checkpoint_go_and_others_follow(run):
    lines = b"".join(json.dumps({"round": number}).encode() + b"\n" for number in range(1, 6))
    write_bytes(run / ROUNDS, lines + b'{"round": 2, "be')
    recorder = Recorder(run, 3, print)
    recorder({"round": 4, "members": ["a", "b"], "healed": False})
    recorder.flush()
    assert [each["round"] for each in rounds_of(run)] == [1, 2, 3, 4]
    recorder({"round": 5})
    recorder.close()
    assert [each["round"] for each in rounds_of(run)] == [1, 2, 3, 4, 5]
    assert rounds_of(run)[3] == {"round": 4, "members": ["a", "b"], "healed": False}


def test_an_island_ends_as_ever_when_the_store_takes_no_more(s3, s3_endpoint, monkeypatch):
    with proxied(s3_endpoint) as (endpoint, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        said: list[str] = []
        recorder = Recorder(s3, 0, said.append)
        recorder({"round": 1})
        proxy.faults[:] = [Fault("expired", 100, "PUT")]
        recorder.close()
        assert len(said) == 1
        assert said[0].startswith(f"{s3}/{ROUNDS} lacks its last 1 lines. {s3}/{ROUNDS}: the store refused access (Exp")
