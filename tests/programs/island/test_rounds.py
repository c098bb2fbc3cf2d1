"""rounds.jsonl, on a disk and in a store."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from gregale.programs.island.loop import IslandResources
from gregale.runs.history import ROUNDS
from gregale.storage import write_bytes
from gregale.storage.jsonl_reader import read_entries
from gregale.storage.jsonl_writer import ResumePoint, lines_at
from tests.stores import Fault, proxied


def resources(run, last: int) -> IslandResources:
    controller: Any = SimpleNamespace(close=lambda: None)
    outer: Any = None
    return IslandResources(outer, controller, run, [], lines_at(run / ROUNDS, ResumePoint("round", last), print))


def rounds_of(run):
    return read_entries(run / ROUNDS, number="round").entries


@pytest.fixture(params=["tmp_path", "s3"])
def run(request):
    return request.getfixturevalue(request.param)


def test_rounds_after_the_checkpoint_go_and_others_follow(run):
    lines = b"".join(json.dumps({"round": number}).encode() + b"\n" for number in range(1, 6))
    write_bytes(run / ROUNDS, lines + b'{"round": 2, "be')
    island, said = resources(run, 3), []
    island.rounds.add({"round": 4, "members": ["a", "b"], "healed": False})
    island.flush()
    assert [each["round"] for each in rounds_of(run)] == [1, 2, 3, 4]
    island.rounds.add({"round": 5})
    island.close(said.append)
    assert [each["round"] for each in rounds_of(run)] == [1, 2, 3, 4, 5]
    assert rounds_of(run)[3] == {"round": 4, "members": ["a", "b"], "healed": False}


def test_an_island_ends_as_ever_when_the_store_takes_no_more(s3, s3_endpoint, monkeypatch):
    with proxied(s3_endpoint) as (endpoint, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        said: list[str] = []
        island = resources(s3, 0)
        island.rounds.add({"round": 1})
        proxy.faults[:] = [Fault("expired", 100, "PUT")]
        island.close(said.append)
        assert len(said) == 1
        assert said[0].startswith(f"{s3}/{ROUNDS} lacks its last 1 lines. {s3}/{ROUNDS}: the store refused access (Exp")
