"""The protocol's real members in a model of time, against what can be worked out."""

from dataclasses import replace

import pytest

from gregale.islands.failures.fleet import Fleet, Outage, Site, draw_outages, draw_sites
from gregale.islands.failures.world import World
from gregale.islands.protocol.settings import LAN
from gregale.methods.schedule import Schedule

HOUR = 3600.0
TIMING = replace(LAN, join_seconds=4.0, reduce_seconds=60.0)


def fleet_of(islands=20, fragments=1, delay=1, spread=0.3, message_bytes=1e9, bytes_per_second=1e9):
    sites = draw_sites(islands, 1.0, bytes_per_second, (spread, 0.0), seed=0)
    return Fleet(sites, Schedule(100, fragments, delay, 12), message_bytes, 8e9, 8e9, 0.05, TIMING)


@pytest.mark.parametrize("fragments", [1, 4])
def test_no_failures_no_loss(fragments):
    fleet = fleet_of(fragments=fragments)
    found = World(fleet, (), 1000.0).run()
    assert found.goodput == pytest.approx(1.0)
    assert found.tokens == pytest.approx(1.0)
    assert (found.lost, found.down, found.waiting, found.deaths) == (0, 0, 0, 0)
    assert (found.failed_reduces, found.repeated_reduces, found.generations) == (0, 0, 0)
    fastest = min(site.step_seconds for site in fleet.sites)
    assert found.rounds == int((1000.0 / fastest) // (100 / fragments))
    assert found.bytes_per_round == pytest.approx(2 * 19 / 20 * 1e9)


def test_without_overlap_all_wait_for_the_network():
    # Equal islands: 100 s of steps, then 2 x 19/20 s of transfers, two asks and the coordinator's ticks.
    found = World(fleet_of(delay=0, spread=0.0), (), 1100.0).run()
    assert found.rounds == 10
    assert 10 * 1.9 / 1100 < found.waiting < 10 * 2.9 / 1100
    assert found.goodput == pytest.approx(1 - found.waiting)


def test_a_link_that_is_too_slow_is_waited_for():
    # 190 s of transfers a round, in which 100 s of steps fit.
    found = World(fleet_of(spread=0.0, message_bytes=50e9, bytes_per_second=0.5e9), (), 4000.0)
    found.fleet = replace(found.fleet, timing=replace(TIMING, reduce_seconds=1000.0))
    outcome = found.run()
    assert outcome.goodput == pytest.approx(100 / 190, rel=0.1)
    assert outcome.rounds == pytest.approx(4000 / 190, abs=1.5)


def test_one_death():
    fleet = fleet_of(spread=0.0)
    found = World(fleet, (Outage(350.0, 3, 420.0),), 1000.0).run()
    all_seconds = 20 * 1000.0
    # Messages leave every 100 s: the steps since the one at 300 s die with it.
    assert found.lost == pytest.approx(50 / all_seconds, rel=0.02)
    assert found.down == pytest.approx(70 / all_seconds)
    # It hears of the fleet when the next round, due at 500 s, is asked for; then it fetches 16 GB at 1 GB/s, and the
    # 8 GB of the outer state again, as that round is committed meanwhile.
    assert found.state_bytes == 24e9
    assert 80 + 24 < found.joining * all_seconds < 80 + 24 + 2
    assert found.goodput == pytest.approx(1 - found.lost - found.down - found.joining)
    assert found.commit.mean_seconds == pytest.approx(50 + 1.9, abs=2)
    # Its ask waits at the coordinator from then on, so it has nothing to bring in the round of 600 s: that of 700 s.
    assert found.rejoin.mean_seconds == pytest.approx(350 + 1.9, abs=3)
    assert (found.rejoin.open, found.commit.open, found.generations) == (0, 0, 0)


def test_a_death_in_the_middle_of_a_reduce_costs_the_others_a_heartbeat():
    fleet = fleet_of(spread=0.0, message_bytes=10e9)  # 19 s
    found = World(fleet, (Outage(310.0, 3, 1e6),), 1000.0).run()
    assert found.failed_reduces == 1
    assert found.commit.mean_seconds == pytest.approx(18 * 20 / 19 + 2.0, abs=1.5)
    assert (found.rounds, found.waiting) == (9, 0)
    assert (found.rejoin.open, found.commit.open) == (1, 0)


def test_one_of_two_dies_and_the_other_turns_a_generation():
    found = World(fleet_of(islands=2, spread=0.0), (Outage(350.0, 1, 420.0),), 1000.0).run()
    assert found.generations >= 1
    assert found.rejoin.open == 0
    assert found.rounds >= 8


def test_the_same_seed_gives_the_same_run():
    outages = draw_outages(20, 0.5 * HOUR, 120.0, 1500.0, seed=3)
    assert len(outages) > 10
    one, other = (World(fleet_of(), outages, 1500.0).run() for _ in range(2))
    assert one == other
    assert draw_outages(20, 0.5 * HOUR, 120.0, 1500.0, seed=4) != outages
    # Every second of every island is in one of the shares.
    assert one.goodput + one.lost + one.down + one.joining + one.waiting == pytest.approx(1.0)
    assert one.joining > 0


def test_a_seed_gives_what_it_gave_before():
    # Whatever makes the simulator or the protocol faster changes nothing of this; another decision may.
    outages = draw_outages(20, 0.5 * HOUR, 120.0, 1500.0, seed=3)
    found = World(fleet_of(fragments=2), outages, 1500.0).run()
    assert (found.deaths, found.rounds, found.failed_reduces, found.generations) == (17, 29, 0, 0)
    assert found.goodput == pytest.approx(0.8870481089979139, rel=1e-12)
    assert found.lost == pytest.approx(0.02861925072776798, rel=1e-12)
    assert found.joining == pytest.approx(0.02027673895419302, rel=1e-12)
    assert (found.state_bytes, found.waiting) == (296e9, 0.0)
    assert found.bytes_per_round == pytest.approx(1890359168.241966, rel=1e-12)
    times = [(each.mean_seconds, each.percentile_95_seconds) for each in (found.rejoin, found.commit)]
    assert times[0] == pytest.approx((193.06331714202796, 217.3639432460327), rel=1e-12)
    assert times[1] == pytest.approx((29.262521302169016, 49.31542001186108), rel=1e-12)
    assert (found.rejoin.open, found.commit.open) == (2, 1)


def test_a_thousand_islands():
    fleet = replace(fleet_of(islands=1000), message_bytes=1e9)
    outages = draw_outages(1000, 50 * HOUR, 60.0, 350.0, seed=0)
    found = World(fleet, outages, 350.0).run()
    assert found.deaths == len(outages) > 0
    assert found.rounds == 3
    assert found.goodput > 0.99


def test_links_and_steps_differ_as_asked():
    sites = draw_sites(500, 2.0, 1e9, (0.5, 3.0), seed=0)
    assert 2.0 <= min(site.step_seconds for site in sites) < 2.05
    assert 2.95 < max(site.step_seconds for site in sites) <= 3.0
    assert 0.25e9 <= min(site.bytes_per_second for site in sites) < 0.26e9
    assert sites != draw_sites(500, 2.0, 1e9, (0.5, 3.0), seed=1)
    assert draw_sites(1, 2.0, 1e9, (0.0, 0.0), seed=5) == (Site(2.0, 1e9),)
