"""Event times against schedules worked out by hand, closed forms, and a slow oracle."""

from functools import cache

import numpy as np
import pytest
from gregale.timeline.table import run_method
from hypothesis import given, settings
from hypothesis import strategies as st

from gregale.timeline.methods import METHODS, PAPER_METHODS, Cadence, Transfer, data_parallel
from gregale.timeline.model import PRESETS, Ring, Workload
from gregale.timeline.simulate import simulate

BANDWIDTHS = np.logspace(-1, 3, 9)


def oracle(workload, transfers, ring, gbit_per_second, steps):
    """The total time at one bandwidth: the graph of all nodes of a site, each after what it depends on.

    Written from the definition, node by node; slow and obvious.
    """
    layers, passes, n = workload.layers, workload.microbatches, ring.sites
    nodes = [("forward", l) for l in range(1, layers + 1)]
    for l in range(layers, 0, -1):
        nodes += [("activations", l)] if l > 1 else []
        nodes += [("parameters", l)]

    queue = []  # (transfer, layer) in the order in which they are released
    for step in range(1, steps + 1):
        for microbatch in range(1, passes + 1):
            now = [t for t in transfers if (t.step, t.microbatch) == (step, microbatch) and n > 1]
            pairs = [(t, l) for t in now for l in t.layers]
            queue += sorted([p for p in pairs if not p[0].after_pass], key=lambda pair: -pair[1])
            queue += [p for p in pairs if p[0].after_pass]

    @cache
    def link_end(place):
        transfer, layer = queue[place]
        node = ("parameters", 1 if transfer.after_pass else layer)
        starts = [node_end(transfer.step, transfer.microbatch, nodes.index(node))]
        if place > 0:
            starts.append(link_end(place - 1))
        bits = 8 * transfer.bytes_per_parameter * workload.parameters / layers
        return max(starts) + 2 * (n - 1) / n * bits / (gbit_per_second * 1e9)

    def arrival(place):
        return link_end(place) + 2 * (n - 1) * ring.latency_seconds

    @cache
    def node_end(step, microbatch, at):
        kind, layer = nodes[at]
        if at > 0:
            starts = [node_end(step, microbatch, at - 1)]
        elif microbatch > 1:
            starts = [node_end(step, microbatch - 1, len(nodes) - 1)]
        else:
            starts = [node_end(step - 1, passes, len(nodes) - 1) if step > 1 else 0.0]
        if kind == "forward" and microbatch == 1:
            starts += [
                arrival(place)
                for place, (t, l) in enumerate(queue)
                if l == layer and t.step + 1 + t.delay_steps == step
            ]
        return max(starts) + workload.step_seconds / (3 * layers * passes)

    return max([node_end(steps, passes, len(nodes) - 1), *(arrival(place) for place in range(len(queue)))])


@st.composite
def cases(draw):
    """A small workload with a schedule, and sites with a latency between them."""
    workload = Workload(6e8, draw(st.integers(1, 3)), 0.3, draw(st.integers(1, 2)))
    ring = Ring(draw(st.integers(1, 4)), draw(st.sampled_from([0.0, 0.02])))
    cadence = Cadence(steps=6, period_steps=4, fragment_layers=1, overlap_steps=draw(st.integers(0, 2)))
    name = draw(st.sampled_from(list(METHODS)))
    return workload, METHODS[name].schedule(workload, cadence, METHODS[name].bytes_per_parameter()), ring


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_event_times_are_the_oracles(case):
    workload, transfers, ring = case
    run = simulate(workload, transfers, ring, BANDWIDTHS, steps=6)
    for at, gbit_per_second in enumerate(BANDWIDTHS):
        assert run.total_seconds[at] == pytest.approx(oracle(workload, transfers, ring, gbit_per_second, 6), rel=1e-12)


def test_the_oracle_tells_a_wrong_order_of_the_queue():
    workload, ring = Workload(6e8, 3, 0.3), Ring(2)
    transfers = data_parallel(workload, Cadence(steps=6), 2.0)
    late = [Transfer(t.step, t.layers, 2.0, after_pass=True) for t in transfers]
    total = simulate(workload, late, ring, np.array([20.0]), steps=6).total_seconds[0]
    assert total > oracle(workload, transfers, ring, 20.0, steps=6) * 1.01


def test_two_layers_by_hand():
    # A node lasts 1 s; a layer's reduction 4 s at 1 Gbit/s (5e8 bytes).
    workload = Workload(parameters=1.0, layers=2, step_seconds=6.0)
    transfers = [Transfer(step, (2, 1), 5e8 * 2) for step in (1, 2)]
    run = simulate(workload, transfers, Ring(2), np.array([1.0]), steps=2)
    # Forward until 2; activations and parameters of layer 2 until 4; parameters of layer 1 until 5.
    # Link: layer 2 from 4 to 8, layer 1 from 8 to 12. Step 2: forward 12 to 14, backward to 16 and 17;
    # link 16 to 20 and 20 to 24.
    np.testing.assert_allclose(run.total_seconds, [24.0])
    np.testing.assert_allclose(run.utilisation, [10 / 24])


@pytest.mark.parametrize("name", METHODS)
def test_infinite_bandwidth_never_waits(name):
    run = run_method(name, PRESETS["1b"], Ring(2), Cadence(), np.array([np.inf]))
    np.testing.assert_allclose(run.utilisation, 1.0, rtol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_one_site_has_nobody_to_wait_for(name):
    run = run_method(name, Workload(1e9, 1, 0.1), Ring(1), Cadence(), BANDWIDTHS)
    np.testing.assert_allclose(run.utilisation, 1.0, rtol=1e-12)
    assert run.sent_bytes == 0.0


def test_one_layer_in_closed_form():
    # Nothing can overlap: every step is its two nodes and the reduction.
    workload = Workload(1e9, 1, 0.3)
    run = run_method("data_parallel", workload, Ring(2), Cadence(steps=7), BANDWIDTHS)
    np.testing.assert_allclose(run.total_seconds, 7 * (0.2 + 16e9 / (BANDWIDTHS * 1e9)), rtol=1e-12)


def test_slow_links_give_the_bandwidth_bound():
    # When the link is never idle between the first release and the end, only its bytes count.
    workload = PRESETS["1b"]
    run = run_method("diloco", workload, Ring(2), Cadence(), np.array([0.1]))
    released = 99 * (0.1 - workload.node_seconds) + (24 + 2) * workload.node_seconds
    np.testing.assert_allclose(run.total_seconds, [released + 160.0], rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_utilisation_grows_with_bandwidth_and_stays_below_one(case):
    workload, transfers, ring = case
    utilisation = simulate(workload, transfers, ring, np.append(BANDWIDTHS, np.inf), steps=6).utilisation
    assert (np.diff(utilisation) >= -1e-12).all()
    assert (utilisation > 0).all()
    assert (utilisation <= 1 + 1e-12).all()


@pytest.mark.parametrize("name", PAPER_METHODS)
def test_bytes_are_conserved(name):
    reductions = 100 if name == "data_parallel" else 1
    run = run_method(name, PRESETS["10b"], Ring(8), Cadence(), BANDWIDTHS[:1])
    np.testing.assert_allclose(
        run.sent_bytes, reductions * 1e10 * METHODS[name].bytes_per_parameter() * 7 / 4, rtol=1e-9
    )


def test_latency_delays_the_arrival_and_leaves_the_link_free():
    workload, bandwidth = Workload(1e9, 4, 0.3), np.array([np.inf])
    run = run_method("data_parallel", workload, Ring(2, 0.25), Cadence(steps=5), bandwidth)
    # Layer 1 comes last and is needed first: each step takes its compute and one delay of two messages.
    np.testing.assert_allclose(run.total_seconds, 5 * (workload.nodes_per_pass * workload.node_seconds + 0.5))


def test_psdp_beats_the_conventional_accumulation_with_microbatches():
    workload = Workload(1e9, 24, 0.8, microbatches=8)
    buffered, conventional = (
        run_method(name, workload, Ring(2), Cadence(steps=20), BANDWIDTHS, codec="float32")
        for name in ("psdp", "data_parallel")
    )
    np.testing.assert_allclose(8 * buffered.sent_bytes, conventional.sent_bytes)
    # 32e9 bits a step against 0.8 s of compute: up to 20 Gbit/s the link decides, and it has an eighth of the work.
    slow = BANDWIDTHS < 20
    assert (buffered.utilisation[slow] > 5 * conventional.utilisation[slow]).all()
