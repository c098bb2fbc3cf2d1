"""Schedules: what is sent, when, and what waits for it."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gregale.errors import UserError
from gregale.timeline import (
    METHODS,
    PAYLOADS,
    PRESETS,
    Cadence,
    Ring,
    Workload,
    data_parallel,
    diloco,
    islands,
    psdp,
    simulate,
    streaming,
    streaming_overlap,
)


def toy(layers=4, microbatches=1):
    return Workload(parameters=layers, layers=layers, step_seconds=1.0, microbatches=microbatches)


@pytest.mark.parametrize(("model", "fragments", "spacing"), [("1b", 8, 11), ("10b", 16, 5), ("100b", 36, 2)])
def test_the_papers_fragments(model, fragments, spacing):
    sent = streaming(PRESETS[model], Cadence(), 2.0)
    assert [transfer.step for transfer in sent] == [(i + 1) * spacing for i in range(fragments)]
    assert {len(transfer.layers) for transfer in sent} == {3}
    assert sent[1].layers == (2 + 2 * fragments, 2 + fragments, 2)


@given(layers=st.integers(1, 40), fragment_layers=st.integers(1, 8), periods=st.integers(1, 3))
def test_streaming_sends_every_layer_once_a_period(layers, fragment_layers, periods):
    cadence = Cadence(steps=100 * periods, fragment_layers=fragment_layers)
    sent = streaming(toy(layers), cadence, 2.0)
    for period in range(periods):
        steps = range(100 * period + 1, 100 * (period + 1) + 1)
        counts = Counter(layer for transfer in sent if transfer.step in steps for layer in transfer.layers)
        assert counts == Counter(range(1, layers + 1))


def test_overlap_changes_only_the_delay():
    cadence = Cadence(overlap_steps=5)
    late, soon = (schedule(PRESETS["1b"], cadence, 2.0) for schedule in (streaming_overlap, streaming))
    assert [(t.step, t.layers) for t in late] == [(t.step, t.layers) for t in soon]
    assert {t.delay_steps for t in late} == {5}


def test_islands_wait_where_the_next_fragment_departs():
    """A late fragment is taken where it arrives: links that are slower than tau = 1 needs cost nothing."""
    workload, cadence = toy(layers=4), Cadence(steps=60, period_steps=30, fragment_layers=2)
    sent = islands(workload, cadence, 4.0)
    spacing = 30 // 3
    assert [t.step for t in sent] == [10, 20, 40, 50]
    assert {t.delay_steps for t in sent} == {spacing}
    compute = 1 - 1 / 12
    link = 2 * 4.0 * 8 / (spacing * compute) / 1e9  # two layers in the steps between two rounds
    at = np.array([link * 1.001, link / 2])
    reached = simulate(workload, sent, Ring(2), at, 60).utilisation
    assert reached[0] > 0.999
    assert reached[1] < 0.9


def test_data_parallel_sends_in_every_microbatch_and_psdp_in_the_last():
    workload, cadence = toy(layers=3, microbatches=4), Cadence(steps=2)
    conventional = data_parallel(workload, cadence, 4.0)
    assert [(t.step, t.microbatch) for t in conventional] == [(s, m) for s in (1, 2) for m in (1, 2, 3, 4)]
    buffered = psdp(workload, cadence, 4.0)
    assert [(t.step, t.microbatch, t.layers, t.after_pass) for t in buffered] == [
        (step, 4, (1, 2, 3), True) for step in (1, 2)
    ]


def test_diloco_sends_everything_at_the_end_of_each_period():
    sent = diloco(toy(layers=3), Cadence(steps=70, period_steps=30), 2.0)
    assert [(t.step, t.layers) for t in sent] == [(30, (3, 2, 1)), (60, (3, 2, 1))]


def test_too_many_fragments_and_too_long_delays_are_refused():
    with pytest.raises(UserError, match=r"10 steps are too few for 12 fragments .* use at least 13 steps"):
        streaming(toy(layers=12), Cadence(period_steps=10, fragment_layers=1), 2.0)
    with pytest.raises(UserError, match="overlap_steps: 100 must be at least 0 and below period_steps = 100"):
        Cadence(overlap_steps=100)


def test_a_codec_shrinks_only_the_gradients_of_psdp():
    assert PAYLOADS["4bit"].bytes_per_parameter == 0.5, "as the paper counts"
    assert METHODS["psdp"].bytes_per_parameter() == 4.0
    assert METHODS["loco"].bytes_per_parameter() == (0.53125 + 4) / 2
    assert METHODS["diloco"].bytes_per_parameter("int4") == 0.53125
    assert METHODS["diloco"].bytes_per_parameter("int4", each=8) == 4 * 0.53125, "7 messages are 2 * 7 / 8 of four"
    assert METHODS["psdp"].bytes_per_parameter(each=8) == 4.0
