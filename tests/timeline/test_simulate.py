"""Event times against schedules worked out by hand, closed forms, and a slow oracle."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gregale.timeline.fleet import NEVER, Fleet
from gregale.timeline.methods import METHODS, PAPER_METHODS, Cadence, Transfer, data_parallel
from gregale.timeline.model import PRESETS, Workload
from gregale.timeline.simulate import Interval, simulate
from gregale.timeline.table import run_method

BANDWIDTHS = np.logspace(-1, 3, 9)


def oracle(workload, transfers, fleet, gbit_per_second, steps):
    """(end of each site, total) at one bandwidth: the graph of all nodes, each after what it depends on.

    Written from the definition, node by node and site by site; slow and obvious.
    """
    layers, passes = workload.layers, workload.microbatches
    sites = range(len(fleet.slowness))
    nodes = [("forward", l) for l in range(1, layers + 1)]
    for l in range(layers, 0, -1):
        nodes += [("activations", l)] if l > 1 else []
        nodes += [("parameters", l)]

    def present(step):
        return [s for s in sites if fleet.leaves_at_step[s] > step]

    queue = []  # (transfer, layer) in the order in which they are released
    for step in range(1, steps + 1):
        for microbatch in range(1, passes + 1):
            now = [t for t in transfers if (t.step, t.microbatch) == (step, microbatch) and len(present(step)) > 1]
            pairs = [(t, l) for t in now for l in t.layers]
            queue += sorted([p for p in pairs if not p[0].after_pass], key=lambda pair: -pair[1])
            queue += [p for p in pairs if p[0].after_pass]

    @cache
    def link_end(place):
        transfer, layer = queue[place]
        node = ("parameters", 1 if transfer.after_pass else layer)
        members = present(transfer.step)
        starts = [node_end(s, transfer.step, transfer.microbatch, nodes.index(node)) for s in members]
        if place > 0:
            starts.append(link_end(place - 1))
        n = len(members)
        speed = min(
            1.0 if fleet.links is None else fleet.links[a, b]
            for a, b in zip(members, members[1:] + members[:1], strict=True)
        )
        bits = 8 * transfer.bytes_per_parameter * workload.parameters / layers
        return max(starts) + 2 * (n - 1) / n * bits / (gbit_per_second * 1e9 * speed)

    def arrival(place):
        return link_end(place) + 2 * (len(present(queue[place][0].step)) - 1) * fleet.latency_seconds

    @cache
    def node_end(site, step, microbatch, at):
        kind, layer = nodes[at]
        if at > 0:
            starts = [node_end(site, step, microbatch, at - 1)]
        elif microbatch > 1:
            starts = [node_end(site, step, microbatch - 1, len(nodes) - 1)]
        else:
            starts = [node_end(site, step - 1, passes, len(nodes) - 1) if step > 1 else 0.0]
        if kind == "forward" and microbatch == 1:
            starts += [
                arrival(place)
                for place, (t, l) in enumerate(queue)
                if l == layer and t.step + 1 + t.delay_steps == step
            ]
        return max(starts) + fleet.slowness[site] * workload.step_seconds / (3 * layers * passes)

    last_steps = [min(steps, fleet.leaves_at_step[s] - 1) for s in sites]
    ends = [
        node_end(s, last, passes, len(nodes) - 1) if last else 0.0 for s, last in zip(sites, last_steps, strict=True)
    ]
    return ends, max([*ends, *(arrival(place) for place in range(len(queue)))])


@st.composite
def cases(draw):
    """A small workload with a schedule, stragglers, a site that may drop out, and links that differ."""
    workload = Workload(6e8, draw(st.integers(1, 3)), 0.3, draw(st.integers(1, 2)))
    sites = draw(st.integers(1, 4))
    slowness = np.array(draw(st.lists(st.sampled_from([1.0, 1.1, 2.0]), min_size=sites, max_size=sites)))
    leaves = np.full(sites, NEVER)
    leaves[draw(st.integers(0, sites - 1))] = draw(st.sampled_from([2, 3, 5, NEVER]))
    links = np.array(draw(st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=sites**2, max_size=sites**2)))
    fleet = Fleet(slowness, leaves, draw(st.sampled_from([0.0, 0.02])), links.reshape(sites, sites))
    cadence = Cadence(steps=6, period_steps=4, fragment_layers=1, overlap_steps=draw(st.integers(0, 2)))
    name = draw(st.sampled_from(list(METHODS)))
    return workload, METHODS[name].schedule(workload, cadence, METHODS[name].bytes_per_parameter()), fleet


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_event_times_are_the_oracles(case):
    workload, transfers, fleet = case
    run = simulate(workload, transfers, fleet, BANDWIDTHS, steps=6)
    for at, gbit_per_second in enumerate(BANDWIDTHS):
        ends, total = oracle(workload, transfers, fleet, gbit_per_second, steps=6)
        assert run.total_seconds[at] == pytest.approx(total, rel=1e-12)
        for site, end in enumerate(ends):
            expected = end if fleet.leaves_at_step[site] <= 6 else total
            assert run.present_seconds[site, at] == pytest.approx(expected, rel=1e-12)


def test_the_oracle_tells_a_wrong_order_of_the_queue():
    workload, fleet = Workload(6e8, 3, 0.3), Fleet.uniform(2)
    transfers = data_parallel(workload, Cadence(steps=6), 2.0)
    late = [Transfer(t.step, t.layers, 2.0, after_pass=True) for t in transfers]
    total = simulate(workload, late, fleet, np.array([20.0]), steps=6).total_seconds[0]
    assert total > oracle(workload, transfers, fleet, 20.0, steps=6)[1] * 1.01


def test_two_layers_by_hand():
    # A node lasts 1 s; a layer's reduction 4 s at 1 Gbit/s (5e8 bytes).
    workload = Workload(parameters=1.0, layers=2, step_seconds=6.0)
    transfers = [Transfer(step, (2, 1), 5e8 * 2) for step in (1, 2)]
    run = simulate(workload, transfers, Fleet.uniform(2), np.array([1.0]), steps=2)
    # Forward until 2; activations and parameters of layer 2 until 4; parameters of layer 1 until 5.
    # Link: layer 2 from 4 to 8, layer 1 from 8 to 12. Step 2: forward 12 to 14, backward to 16 and 17;
    # link 16 to 20 and 20 to 24.
    assert run.intervals == [
        Interval("forward", 1, (1, 2), 0.0, 2.0),
        Interval("transfer", 1, (2, 2), 4.0, 8.0),
        Interval("transfer", 1, (1, 1), 8.0, 12.0),
        Interval("backward", 1, (1, 2), 2.0, 5.0),
        Interval("forward", 2, (1, 1), 12.0, 13.0),
        Interval("forward", 2, (2, 2), 13.0, 14.0),
        Interval("transfer", 2, (2, 2), 16.0, 20.0),
        Interval("transfer", 2, (1, 1), 20.0, 24.0),
        Interval("backward", 2, (1, 2), 14.0, 17.0),
    ]
    np.testing.assert_allclose(run.total_seconds, [24.0])
    np.testing.assert_allclose(run.utilisation, [10 / 24])


@pytest.mark.parametrize("name", METHODS)
def test_infinite_bandwidth_never_waits(name):
    run = run_method(name, PRESETS["1b"], Fleet.uniform(2), Cadence(), np.array([np.inf]))
    np.testing.assert_allclose(run.utilisation, 1.0, rtol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_one_site_has_nobody_to_wait_for(name):
    run = run_method(name, Workload(1e9, 1, 0.1), Fleet.uniform(1), Cadence(), BANDWIDTHS)
    np.testing.assert_allclose(run.utilisation, 1.0, rtol=1e-12)
    np.testing.assert_array_equal(run.sent_bytes, [0.0])


def test_one_layer_in_closed_form():
    # Nothing can overlap: every step is its two nodes and the reduction.
    workload = Workload(1e9, 1, 0.3)
    run = run_method("data_parallel", workload, Fleet.uniform(2), Cadence(steps=7), BANDWIDTHS)
    np.testing.assert_allclose(run.total_seconds, 7 * (0.2 + 16e9 / (BANDWIDTHS * 1e9)), rtol=1e-12)


def test_slow_links_give_the_bandwidth_bound():
    # When the link is never idle between the first release and the end, only its bytes count.
    workload = PRESETS["1b"]
    run = run_method("diloco", workload, Fleet.uniform(2), Cadence(), np.array([0.1]))
    released = 99 * (0.1 - workload.node_seconds) + (24 + 2) * workload.node_seconds
    np.testing.assert_allclose(run.total_seconds, [released + 160.0], rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_utilisation_grows_with_bandwidth_and_stays_below_one(case):
    workload, transfers, fleet = case
    utilisation = simulate(workload, transfers, fleet, np.append(BANDWIDTHS, np.inf), steps=6).utilisation
    assert (np.diff(utilisation) >= -1e-12).all()
    assert (utilisation > 0).all()
    assert (utilisation <= 1 + 1e-12).all()


@pytest.mark.parametrize("name", PAPER_METHODS)
def test_bytes_are_conserved(name):
    reductions = 100 if name == "data_parallel" else 1
    run = run_method(name, PRESETS["10b"], Fleet.uniform(8), Cadence(), BANDWIDTHS[:1])
    np.testing.assert_allclose(
        run.sent_bytes, reductions * 1e10 * METHODS[name].bytes_per_parameter() * 7 / 4, rtol=1e-9
    )
    link_seconds = sum(work.end - work.start for work in run.intervals if work.kind == "transfer")
    assert link_seconds == pytest.approx(8 * run.sent_bytes[0] / (BANDWIDTHS[0] * 1e9), rel=1e-9)


def test_the_intervals_of_site_0_are_its_compute_without_overlap():
    run = run_method("data_parallel", PRESETS["1b"], Fleet.uniform(2), Cadence(), np.array([3.0]))
    compute = [work for work in run.intervals if work.kind != "transfer"]
    assert sum(work.end - work.start for work in compute) == pytest.approx(run.compute_seconds[0])
    for row in (compute, [work for work in run.intervals if work.kind == "transfer"]):
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(row))


def test_a_straggler_sets_the_pace_of_data_parallel():
    slow = Fleet(np.array([1.0, 3.0]), np.full(2, NEVER))
    run = run_method("data_parallel", PRESETS["1b"], slow, Cadence(), np.array([np.inf]))
    np.testing.assert_allclose(run.total_seconds, 100 * 3 * PRESETS["1b"].nodes_per_pass * PRESETS["1b"].node_seconds)
    np.testing.assert_allclose(run.utilisation, (1 + 3) / (3 + 3))


def test_a_site_that_drops_out_stops_computing_and_sending():
    fleet = Fleet(np.ones(3), np.array([NEVER, 51, NEVER]))
    run = run_method("data_parallel", PRESETS["1b"], fleet, Cadence(), np.array([100.0]))
    step_seconds = PRESETS["1b"].nodes_per_pass * PRESETS["1b"].node_seconds
    np.testing.assert_allclose(run.compute_seconds, np.array([100, 50, 100]) * step_seconds)
    np.testing.assert_allclose(run.sent_bytes, 2e9 * (50 * 4 / 3 + np.array([50, 0, 50])))
    assert run.present_seconds[1, 0] < run.total_seconds[0]


def test_latency_delays_the_arrival_and_leaves_the_link_free():
    workload, bandwidth = Workload(1e9, 4, 0.3), np.array([np.inf])
    run = run_method("data_parallel", workload, Fleet.uniform(2, latency_seconds=0.25), Cadence(steps=5), bandwidth)
    # Layer 1 comes last and is needed first: each step takes its compute and one delay of two messages.
    np.testing.assert_allclose(run.total_seconds, 5 * (workload.nodes_per_pass * workload.node_seconds + 0.5))


def test_a_late_arrival_counts_though_the_ring_has_shrunk():
    # Three sites send in step 1 with four delays; one leaves, and two sites send in step 2 with two delays.
    fleet = Fleet(np.ones(3), np.array([NEVER, NEVER, 2]), latency_seconds=10.0)
    workload = Workload(1e9, 1, 0.3)
    transfers = [Transfer(step, (1,), 2.0, delay_steps=5) for step in (1, 2)]
    run = simulate(workload, transfers, fleet, np.array([np.inf]), steps=2)
    np.testing.assert_allclose(run.total_seconds, [0.2 + 40.0])


def test_psdp_beats_the_conventional_accumulation_with_microbatches():
    workload = Workload(1e9, 24, 0.8, microbatches=8)
    buffered, conventional = (
        run_method(name, workload, Fleet.uniform(2), Cadence(steps=20), BANDWIDTHS, codec="float32")
        for name in ("psdp", "data_parallel")
    )
    np.testing.assert_allclose(8 * buffered.sent_bytes, conventional.sent_bytes)
    # 32e9 bits a step against 0.8 s of compute: up to 20 Gbit/s the link decides, and it has an eighth of the work.
    slow = BANDWIDTHS < 20
    assert (buffered.utilisation[slow] > 5 * conventional.utilisation[slow]).all()


def test_ten_thousand_different_sites():
    slowness = np.random.default_rng(0).uniform(1.0, 1.5, 10_000)
    run = run_method("data_parallel", PRESETS["1b"], Fleet(slowness, np.full(10_000, NEVER)), Cadence(), BANDWIDTHS)
    assert run.present_seconds.shape == (10_000, len(BANDWIDTHS))
    # No site ends before its own compute, and the slowest is the one that decides when there is bandwidth enough.
    assert run.total_seconds[-1] == pytest.approx(run.compute_seconds.max(), rel=0.2)
    assert (run.present_seconds >= run.compute_seconds[:, None]).all()


def test_sites_in_lockstep_are_as_if_simulated_alone():
    slowness = np.array([1.0, 1.2, 1.0, 1.2])
    leaves = np.array([NEVER, 3, NEVER, NEVER])
    cadence = Cadence(steps=6, period_steps=4, fragment_layers=1)
    order = [2, 3, 0, 1]
    run = run_method("streaming", Workload(6e8, 3, 0.3), Fleet(slowness, leaves), cadence, BANDWIDTHS)
    other = run_method("streaming", Workload(6e8, 3, 0.3), Fleet(slowness[order], leaves[order]), cadence, BANDWIDTHS)
    np.testing.assert_array_equal(run.present_seconds[order], other.present_seconds)
    np.testing.assert_array_equal(run.sent_bytes[order], other.sent_bytes)
