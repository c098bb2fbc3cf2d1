"""Spikes: steps far above the last ones change nothing, are counted apart, and each replica decides for itself."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from gregale.axes.layout import MeshConfig
from gregale.methods.config import DilocoConfig
from gregale.methods.method import SpikesConfig, SpikeWindow
from gregale.training.state import Stepper, counted_step, initial_state
from tests.mesh.support import held, token_batch
from tests.mesh.test_mapping import EMPTY, ONE, POSITIONS, ROWS, VOCABULARY, set_up_on
from tests.training.test_state import Training, batch

CONFIG = SpikesConfig(window=5, sigma=3.0)


class OnToy(Training):
    def __init__(self, spikes: SpikesConfig | None):
        super().__init__()
        method = replace(self.step._method, spikes=spikes)
        line = method.model
        self.state, self.step = initial_state(method, lambda: line), Stepper(method, line)


def decided(values: list[float], norms: list[float]) -> list[bool]:
    """Which steps are spikes, by the rule as its window's lists."""
    seen: list[tuple[float, float]] = []
    found = []
    for pair in zip(values, norms, strict=True):
        last = np.asarray(seen[-CONFIG.window :], np.float32)
        full = len(last) == CONFIG.window
        found.append(bool(np.isfinite(pair).all() and full and np.any(pair > last.mean(0) + 3 * last.std(0))))
        if np.isfinite(pair).all():
            seen.append(pair)
    return found


@jax.jit
def judged(window: SpikeWindow, loss: jax.Array, norm: jax.Array) -> tuple[SpikeWindow, jax.Array]:
    limits, finite = window.limits(CONFIG.sigma), jnp.isfinite(loss) & jnp.isfinite(norm)
    spike = finite & ((loss > limits.loss) | (norm > limits.norm))
    return window.after(loss, norm, finite, spike), spike


def by_window(values: list[float], norms: list[float]) -> list[bool]:
    window, found = SpikeWindow.empty(CONFIG, ()), []
    for loss, norm in zip(np.float32(values), np.float32(norms), strict=True):
        window, spike = judged(window, loss, norm)
        found.append(bool(spike))
    assert int(window.spikes) == sum(found)
    return found


def test_a_spike_is_above_the_mean_by_sigma_deviations_of_the_last_finite_values():
    random = np.random.default_rng(0)
    losses, norms = random.normal(3, 0.1, 60).tolist(), random.normal(1, 0.2, 60).tolist()
    for place, value in ((2, 9.0), (20, 9.0), (21, 9.0), (30, np.nan), (31, np.inf), (40, 5.0)):
        losses[place] = value
    norms[50] = 30.0
    found = by_window(losses, norms)
    assert found == decided(losses, norms)
    assert {20, 40, 50} <= {*np.flatnonzero(found)}
    assert not found[2], "the window is not full"


def test_steep_losses_of_a_warm_up_are_none_and_after_a_lasting_rise_steps_count_again():
    steep = (10 * 0.8 ** np.arange(40)).tolist()
    assert not any(by_window(steep, steep))
    risen = [1.0, 1.1, 0.9, 1.0, 1.1] + [9.0] * 12
    assert by_window(risen, [1.0] * 17)[-8:] == [False] * 8


def test_a_batch_with_a_loss_fifty_times_larger_leaves_no_trace_but_in_the_window():
    clean, dirty = OnToy(CONFIG), OnToy(CONFIG)
    for number in range(8):
        clean.take(batch(number))
        dirty.take(batch(number))
    x, y, weight = batch(9)
    before, report = dirty.bits(), dirty.take((x, 50 * y, weight))
    assert np.isfinite(report.metrics.loss)
    assert report.metrics.spike
    assert dirty.bits() == before == clean.bits()
    assert (int(report.spikes), int(report.skipped)) == (1, 0)
    report = dirty.take(batch(10))
    assert not report.metrics.spike
    assert dirty.bits() != before


def test_each_replica_of_diloco_decides_for_itself():
    spikes = SpikesConfig(window=2, sigma=0.01)
    mesh = MeshConfig(replica=2, data=2)
    setup = set_up_on(mesh, EMPTY, sync=DilocoConfig(period=100), skip_spikes=spikes)
    state, step = setup.initial_state(), jax.jit(lambda state, batch: counted_step(setup.method, state, batch))
    usual, other = (token_batch(ROWS, POSITIONS, VOCABULARY, seed=seed) for seed in (1, 2))
    for _ in range(3):
        state, _ = step(state, held(usual, setup.layout))
    rows = np.arange(ROWS)[:, None] < ROWS // 2
    mixed = {name: replace(usual[name], array=np.where(rows, usual[name].array, other[name].array)) for name in usual}
    after, report = step(state, held(mixed, setup.layout))
    assert report.metrics.spike.tolist() == [False, True]
    assert report.spikes.tolist() == [0, 1]
    for old, new in zip(*(jax.tree.leaves(each.method.inner) for each in (state, after)), strict=True):
        np.testing.assert_array_equal(old[1], new[1])
    jax.tree.map(np.testing.assert_array_equal, after.method.outer, state.method.outer)
    moved = jax.tree.leaves(after.method.inner.parameters)[0], jax.tree.leaves(state.method.inner.parameters)[0]
    assert np.any(moved[0][0] != moved[1][0])
    assert ONE.skip_spikes is None
