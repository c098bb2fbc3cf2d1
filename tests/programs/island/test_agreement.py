"""Which settings the islands of a fleet must have in common."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gregale.data.config import DataConfig
from gregale.data.mixtures import with_mixture
from gregale.data.sources import SourceConfig, TextSource
from gregale.distributed.agreement import difference, from_text
from gregale.errors import UserError
from gregale.islands.protocol.messages import pack, read_texts, to_texts
from gregale.islands.run import agreement, check_mixtures, disagreement
from gregale.islands.section import IslandsSection
from gregale.runs.config import TrainConfig

CORPUS: Any = SimpleNamespace(stores={}, tokenizer=SimpleNamespace(fingerprint="t"), fingerprint="d")


def settings(**islands: Any) -> dict[str, str]:
    return of_stages(TrainConfig("tiny", 4, islands=IslandsSection(**islands)))


def of_stages(config: TrainConfig, *rounds: int) -> dict[str, str]:
    stages = [(stage.config, CORPUS) for stage in config.each_stage]
    return dict(from_text(agreement(stages, rounds, ["shards"])))


@pytest.mark.parametrize(
    ("islands", "says"),
    [
        ({"heartbeat_seconds": 7.0}, "islands.heartbeat_seconds is 2.0 in the fleet, but 7.0 in this island"),
        ({"min_members_to_start": 3}, "islands.min_members_to_start is 1 in the fleet, but 3 in this island"),
        ({"network": "wan"}, "islands.network is lan in the fleet, but wan in this island"),
        ({"heartbeat_seconds": 2.0, "name": "oslo", "reduce_seconds": 9.0}, ""),
    ],
)
def test_an_island_with_other_seconds_than_the_fleet_differs(islands, says):
    text = difference({"the fleet": settings(), "this island": settings(**islands)})
    assert text.startswith(says)
    assert bool(says) == bool(text)


def staged(weight: float, size: int = 64, **data: Any) -> TrainConfig:
    sources: dict[str, SourceConfig] = {"web": TextSource(files=("a",))}
    change = {"from": 4, "batch": {"size": size}, "data": {"sources": {"web": {"weight": weight}}, **data}}
    return TrainConfig("tiny", 9, data=DataConfig(sources=sources), stages=[change])


def test_islands_with_other_stages_than_the_fleet_differ_in_what_all_share():
    fleet = of_stages(staged(2.0), 3)
    assert {key: value for key, value in fleet.items() if key.startswith("stages.")} == {
        "stages.0.from": "round 3",
        "stages.0.data.sources.web.weight": "2.0",
    }

    def says(*island: Any) -> str:
        return difference({"the fleet": fleet, "this island": of_stages(*island)})

    assert not says(staged(2.0, size=8), 3), "each has its own batch"
    assert says(staged(3.0), 3) == "stages.0.data.sources.web.weight is 2.0 in the fleet, but 3.0 in this island"
    assert says(staged(2.0), 4) == "stages.0.from is round 3 in the fleet, but round 4 in this island"
    alone = replace(staged(2.0), stages=[])
    assert says(alone).startswith("stages.0.from is round 3 in the fleet, but not set in this island")


def test_an_island_knows_before_it_compiles_what_its_fleet_would_refuse():
    """Only its shards and frozen weights are not known by then."""

    def header(name: str, text: str, version: str = "1") -> dict[str, str]:
        return to_texts({"name": name, "version": version, "agreement": text})

    def text(seed: int, *shards: str) -> str:
        return agreement([(TrainConfig("tiny", 4, seed=seed), CORPUS)], [], shards)

    def says(*fleet: dict[str, str], own: str = text(5, ""), version: str = "1") -> str:
        return disagreement(read_texts(pack(fleet)), "c", version, own)

    fleet = [header("a", text(0, "shards")), header("b", text(0, "shards")), header("d", text(5, "shards"))]
    assert says(*fleet) == "seed is 0 in the fleet, but 5 in this island"
    assert says(*fleet, own=text(0, "")) == ""
    assert says(*fleet, own=text(0, "", "")).startswith("the number of an island's hosts is 1 in the fleet, but 2 in")
    assert says(*fleet, version="2") == "the fleet runs Gregale 1 and this island 2"
    assert says() == ""
    assert says(header("c", text(0, "shards"))) == "", "its own process from before has ended"


def test_a_mixture_that_is_of_no_stage_is_refused():
    """All islands draw from one order of examples, so one alone cannot go on with other weights."""
    config = staged(2.0)
    mixtures = with_mixture(with_mixture((), 0, {"web": 1.0}, 1024), 8, {"web": 2.0}, 1024)
    check_mixtures(config, 1, mixtures)
    check_mixtures(config, 1, mixtures[1:])  # it was not there in the first stage
    for number, found in ((0, mixtures), (1, with_mixture(mixtures, 9, {"web": 3.0}, 1024))):
        with pytest.raises(UserError, match=r"data\.sources: the sources or their weights have changed, and all islan"):
            check_mixtures(config, number, found)
