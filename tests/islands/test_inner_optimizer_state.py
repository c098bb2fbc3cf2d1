"""A joiner's inner optimizer is that of the peer, to the last bit, on its own mesh."""

import jax
import numpy as np

from gregale.islands import state
from gregale.methods.schedule import Schedule
from gregale.training.state import Stepper
from tests.mesh.support import layout_of
from tests.methods.islands import Member, island_on, rows


def test_a_peers_optimizer_replaces_the_own_one():
    island = island_on(layout_of(data=2, model=2), Schedule(4, layers=3))
    step = Stepper(island, island.inner.model)
    peer, joiner = Member(island, step), Member(island, step)
    for number in range(1, 4):
        peer.train(rows(number, 1), number)
    theirs, own = peer.state.method.psdp, joiner.state.method.psdp
    arrays = state.on_host(theirs)
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == state.expected(own)
    taken = state.taken_over(own, arrays)
    same = jax.tree.map(
        lambda x, y: np.array_equal(x, y), (taken.sharded, taken.gathered), (theirs.sharded, theirs.gathered)
    )
    assert all(jax.tree.leaves(same))
    assert taken.parameters is own.parameters
    places = jax.tree.map(lambda x, y: x.sharding == y.sharding, taken, own)
    assert all(jax.tree.leaves(places))
