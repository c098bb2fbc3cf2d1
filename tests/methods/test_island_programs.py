"""What is compiled at an island's boundary: bytes alone leave the devices, and nothing of theta stays there."""

import jax
import numpy as np
import pytest

from gregale.codecs.codec import ReduceConfig
from gregale.cost import audit
from gregale.cost.memory import compiler_memory
from gregale.islands.method import Island
from gregale.islands.outer import HostOuter
from gregale.methods.schedule import Schedule
from gregale.training.state import abstract_state, initial_state
from tests.mesh.support import layout_of
from tests.methods.islands import LAYERS, Net, island_on

FOUR_BITS = ReduceConfig(codec="int4", gather_codec="int4")
STREAMING = Schedule(4, 3, 1, LAYERS)


def arguments(island: Island, index: int):
    """Abstract arguments of both programs: the island's, theta's fragment and the fragment."""
    state = abstract_state(island, jax.eval_shape(Net.init)).method
    fragment, finest = island.fragment(index), island.finest
    theta = finest.abstract(jax.eval_shape(fragment.take, state.psdp.parameters), finest.params)
    return state, theta, fragment


def departs(island: Island, index: int):
    state, theta, fragment = arguments(island, index)
    return island._depart.lower(state.psdp.parameters, state.error, theta, fragment).compile()


def arrives(island: Island, index: int):
    state, theta, fragment = arguments(island, index)
    _, error = jax.eval_shape(island.message, state.psdp.parameters, state.error, theta, fragment)
    return island._arrive.lower(state.psdp.parameters, state.error, theta, fragment, np.float32(0.5), error).compile()


@pytest.mark.parametrize(
    ("mesh", "reduce"),
    [({"data": 2, "model": 2}, ReduceConfig()), ({"replica": 2, "data": 2}, FOUR_BITS)],
    ids=["float32", "four bits"],
)
def test_bytes_alone_leave_a_device_and_no_device_talks_to_another_but_to_give_back(mesh, reduce):
    island = island_on(layout_of(**mesh), STREAMING, 0.5, reduce)
    program = departs(island, 1)
    messages, error = program.out_info
    assert {leaf.dtype for leaf in jax.tree.leaves(messages)} == {np.dtype(np.uint8)}
    if not reduce.quantised:
        assert not error.first
    assert audit(program, island.layout.mesh).collectives == ()
    found = audit(arrives(island, 1), island.layout.mesh).collectives
    if "replica" in mesh:  # what a replica has of theta is brought together as PSDP's updates are
        assert {(each.kind, each.axes) for each in found} == {("all-gather", ("replica",))}
    else:
        assert found == ()


def test_a_collective_would_be_seen():
    island = island_on(layout_of(data=2, model=2), STREAMING, 0.5)
    norm = jax.jit(lambda tree: sum(abs(leaf).sum() for leaf in jax.tree.leaves(tree)))
    program = norm.lower(arguments(island, 1)[0].psdp.parameters).compile()
    assert audit(program, island.layout.mesh).collectives


def test_no_copy_of_theta_stays_on_the_devices():
    """The state has PSDP's arrays and the error; both programs write over what they are given."""
    island = island_on(layout_of(), STREAMING, 0.5, FOUR_BITS)
    state = abstract_state(island, jax.eval_shape(Net.init)).method
    psdp = jax.tree.leaves(jax.eval_shape(island.inner.init))
    codes = jax.tree.leaves(state.error.first)
    assert len(jax.tree.leaves(state)) == len(psdp) + len(codes) + 1
    assert sum(leaf.dtype == np.float32 for leaf in codes) == 0
    memory = compiler_memory(arrives(island, 1))
    assert memory.results - memory.aliased <= 64, "parameters and error are written over"


def test_fragments_of_one_size_share_a_program():
    island = island_on(layout_of(), Schedule(8, 4, 1, LAYERS), 0.5)
    state = initial_state(island, Net.init).method
    host = HostOuter(island)
    host.begin(state.psdp.parameters)
    for index in (1, 2, 3):
        _, error = island.depart(state, host.theta(index), island.fragment(index))
        state = island.arrive(state, host.theta(index), island.fragment(index), 0.5, error)
    assert island._depart._cache_size() == island._arrive._cache_size() == 1
