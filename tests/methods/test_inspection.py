"""What is looked at in a step of an island: NumPy's sums of what goes in and comes out; the others' are runs' own."""

from functools import partial

import jax
import numpy as np

from gregale.methods.schedule import Schedule
from tests.mesh.support import layout_of
from tests.methods.islands import LAYERS, Net, batch_of, island_on, rows


def squares(old: Net, new: Net) -> list[np.ndarray]:
    """Sums of squares of differences, of `up` [layers], `readout` and `gain`."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    up, readout, gain = (np.square(np.asarray(a, np.float64) - np.asarray(b, np.float64)) for a, b in pairs)
    return [up.reshape(LAYERS, -1).sum(axis=1), readout.sum(), gain.sum()]


def test_an_island_is_inspected_as_its_steps_are():
    layout = layout_of(data=2)
    island = island_on(layout, Schedule(period=2, layers=LAYERS))
    state, batch = jax.jit(lambda: island.init(Net.init()))(), batch_of(rows(0, 1), layout)
    found = jax.jit(partial(island.inspected, probe=lambda model, batch: {"x": batch["x"]}))(state, batch)
    after = jax.jit(island.step)(state, batch)[0]
    before, nothing = state.psdp.parameters, jax.tree.map(np.zeros_like, state.psdp.parameters)
    expected = {"parameters": squares(before, nothing), "updates": squares(after.psdp.parameters, before)}
    for name, sums in expected.items():
        leaves = jax.tree.leaves(getattr(found, name))
        assert [leaf.shape for leaf in leaves] == [(LAYERS,), (), ()]
        for leaf, total in zip(leaves, sums, strict=True):
            np.testing.assert_allclose(leaf, total, rtol=1e-4)
    assert found.probed["x"].array.shape == batch["x"].array.shape
