"""`gregale plan` of an island: what crosses the network, host memory, and a fragment beside PSDP on the devices."""

import json

import pytest

from gregale.cost.collectives import BETWEEN, INSIDE
from gregale.cost.roofline import Roofline
from gregale.errors import UserError
from gregale.islands.plan import IslandTraffic
from gregale.programs.plan.command import PlanOptions, planned
from gregale.programs.plan.report import joining_costs, report_of
from tests.programs.plans import FOUR_BITS, config_of, plan_of, setup_of, tables

MESH = ["--mesh.replica=1", "--mesh.data=4", "--mesh.model=2"]
LIGHTHOUSE = "--islands.lighthouse=10.0.0.2:29510"
STREAMING = [*MESH, "--sync.type=streaming_diloco", "--sync.period=8", "--sync.fragments=3", "--sync.delay=1"]
STEP_SECONDS = 0.5
BOUND = Roofline(compute=STEP_SECONDS, memory=0.0, links={INSIDE: 0.0, BETWEEN: 0.0}, model=STEP_SECONDS)


def island(*arguments: str, count: int | None = None):
    found = joining_costs(setup_of(LIGHTHOUSE, *arguments), count)
    assert found is not None
    return found


def test_a_report_has_what_the_codec_sends_and_what_the_memory_takes():
    plan = plan_of(planned(config_of(*STREAMING, *FOUR_BITS), 3))
    report = report_of(plan, 257, 0.3, joining_costs(plan.setup, 3))
    assert json.loads(json.dumps(report)) == report
    traffic, found = IslandTraffic(plan.setup.method, 3), report["island"]
    assert found["bytes_per_period"] == traffic.bytes_a_period()
    assert found["bytes_per_round"] == max(traffic.bytes_sent(index) for index in range(3))
    assert (found["host_bytes"], found["host_bytes_in_flight"]) == (
        traffic.host_bytes(),
        traffic.host_bytes_in_flight(),
    )
    in_flight = traffic.device_bytes_in_flight()
    assert report["memory"]["in_flight"] == found["device_bytes_in_flight"] == in_flight
    assert report["memory"]["peak"] == plan.memory.peak + in_flight, "PSDP, and one fragment"
    assert not report["memory"]["outer_parameters"], "they are in host memory"
    assert set(report["programs"]) == {"step"}, "an island's steps are those of PSDP"
    assert report["methods"] == {}
    assert "0.3" in found["links"], "the link that was asked for is beside the others"
    text = tables(report)
    assert "One host of one of 3 islands" in text
    assert "in host memory" in text
    assert "no other replica" not in text


def test_four_bits_take_an_eighth_of_the_network():
    exact, four = island(*STREAMING), island(*STREAMING, *FOUR_BITS)
    ratio = exact.bytes_a_period() / four.bytes_a_period()
    assert ratio == pytest.approx(32 / 4.25, rel=0.05), "norms stay exact"
    assert exact.host_bytes() == four.host_bytes()


def test_rounds_hide_behind_the_steps_until_the_next():
    """A late round is taken where it arrives; the island waits where the next one would depart."""
    found = island(*STREAMING).to_dict(BOUND, None)
    edge = found["hidden_gbit_per_second"]
    traffic = island(*STREAMING)
    steps = [traffic.hiding_steps(number) for number in range(3)]
    assert sum(steps) == 8
    seconds = [traffic.seconds(traffic.island.schedule.round_fragment(n), edge * 1e9 / 8) for n in range(3)]
    assert max(s - n * STEP_SECONDS for s, n in zip(seconds, steps, strict=True)) == pytest.approx(0, abs=1e-9)
    at_edge = traffic.period_seconds(STEP_SECONDS, edge * 1e9 / 8)
    assert at_edge == pytest.approx(8 * STEP_SECONDS)
    half = traffic.period_seconds(STEP_SECONDS, edge * 1e9 / 16)
    waited = sum(max(0.0, 2 * s - n * STEP_SECONDS) for s, n in zip(seconds, steps, strict=True))
    assert half == pytest.approx(8 * STEP_SECONDS + waited)


def test_plain_diloco_and_lockstep_wait():
    plain = island(*MESH, "--sync.type=diloco", "--sync.period=8").to_dict(BOUND, None)
    assert plain["hidden_gbit_per_second"] is None
    slow = plain["links"]["0.05"]
    assert slow["utilisation"] == pytest.approx(8 * STEP_SECONDS / (8 * STEP_SECONDS + slow["round_seconds"]))
    free, bound = island(*STREAMING), island(*STREAMING, "--islands.lockstep=true")
    assert (free.lockstep, bound.lockstep) == (False, True)
    assert bound.hiding_steps(0) == 1 < free.hiding_steps(0)


def test_as_many_islands_as_have_to_be_there():
    assert island(*STREAMING).members == 2
    assert island(*STREAMING, "--islands.min_members_to_start=5").members == 5
    assert island(*STREAMING, "--islands.min_members_to_start=5", count=7).members == 7
    assert joining_costs(setup_of(*STREAMING), None) is None


def test_psdp_cannot_be_planned_as_an_island_and_there_is_one_at_least():
    with pytest.raises(UserError, match=r"sync\.type is 'psdp'"):
        plan_of(planned(config_of(*MESH), 2))
    with pytest.raises(UserError, match="count"):
        PlanOptions(count=0)
