"""What DiLoCo's compiled programs send: nothing over `replica` in a step, the closed form when replicas are joined."""

import jax
import optax
import pytest
from haliax import Axis

from gregale.audit import audit
from gregale.axes.layout import is_named
from gregale.methods.diloco import Diloco
from gregale.methods.fragments import Fragment
from gregale.methods.psdp import Psdp
from gregale.methods.schedule import Schedule
from gregale.model.config import LlamaConfig
from gregale.model.llama import Llama
from gregale.optim import AdamWConfig
from gregale.training.state import abstract_state
from gregale.training.stepper import Stepper
from tests.mesh.support import executed, layout_of, token_batch

LAYERS = 3
CONFIG = LlamaConfig(layers=LAYERS, hidden=32, heads=8, mlp=64)
LARGEST_SCALAR_BYTES = 48  # of several scalars in one collective


def method_on(layout, schedule: Schedule, outer=None) -> Diloco:
    inside = layout.inside("replica")
    execution = executed(inside)
    model = jax.eval_shape(lambda key: Llama.init(CONFIG, Axis("vocab", 64), key), jax.random.key(0))
    inner = Psdp(
        model,
        lambda model, batch: model.loss(batch, execution),
        AdamWConfig().build(model, 100, inside),
        inside,
        microbatches=2,
    )
    return Diloco(inner, outer or optax.sgd(0.7, momentum=0.9, nesterov=True), layout, schedule, mixing=0.5)


@pytest.fixture(scope="module")
def layout():
    return layout_of(replica=2, data=2, model=2)


def abstract_batch(layout):
    return layout.abstract(token_batch(), layout.compute)


def compiled_step(method: Diloco, *during):
    state = abstract_state(method, method.inner.model)
    program = Stepper(method, method.inner.model).program
    return program.lower(state, abstract_batch(method.layout), *during).compile()


def compiled_synchronise(method: Diloco, fragment: Fragment):
    state = abstract_state(method, method.inner.model)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.method)
    program = jax.jit(method.synchronise, out_shardings=(shardings, None))
    return program.lower(state.method, fragment).compile()


def payload(collectives) -> int:
    """Bytes of the parameters' collectives, scalars left out."""
    return sum(each.bytes for each in collectives if each.bytes > LARGEST_SCALAR_BYTES)


def shard_bytes(part, layout) -> int:
    """Bytes of a device's shard of a tree under `params`, from shapes and mappings alone."""
    total = 0
    for leaf in jax.tree.leaves(part, is_leaf=is_named):
        sizes = [layout.mesh.shape[axis] for axis in layout.mesh_axes(leaf.axes, layout.params)]
        count = leaf.size
        for size in sizes:
            count //= size
        total += 4 * count
    return total


def test_the_inner_step_sends_nothing_over_replica(layout):
    method = method_on(layout, Schedule(10, layers=LAYERS))
    program = compiled_step(method, None, None)
    assert audit(program, layout.mesh).over("replica") == ()
    assert audit(program, layout.mesh).over("data"), "the check finds what is there"


@pytest.mark.parametrize("fragments", [1, 4])
def test_joining_sends_the_closed_form(layout, fragments):
    """One reduce-scatter and one all-gather of every shard of the fragment; what a device sends is `bytes_sent`."""
    schedule = Schedule(10, fragments, 0, LAYERS)
    method = method_on(layout, schedule)
    index = fragments - 1
    fragment = Fragment.at(schedule, index, 10)
    over = audit(compiled_synchronise(method, fragment), layout.mesh).over("replica")
    part = jax.eval_shape(fragment.take, method.inner.model)
    assert payload(over) == 2 * shard_bytes(part, layout)
    assert not [each for each in over if each.loop]
    assert {each.axes for each in over if each.bytes > LARGEST_SCALAR_BYTES} == {("replica",)}
    sent = method.bytes_sent(schedule.offset(index) or 10) - method.bytes_sent((schedule.offset(index) or 10) - 1)
    assert sum(each.bytes_sent for each in over if each.bytes > LARGEST_SCALAR_BYTES) == sent


def test_a_streaming_step_sends_one_fragment_each_way(layout):
    """tau = 2: the step that sends one group of layers and applies another sends no more than the two."""
    schedule = Schedule(8, 4, 2, LAYERS)
    method = method_on(layout, schedule)
    send, apply = Fragment.at(schedule, 2, 4), Fragment.at(schedule, 1, 2)
    over = audit(compiled_step(method, send, apply), layout.mesh).over("replica")
    part = jax.eval_shape(send.take, method.inner.model)
    assert payload(over) == 2 * shard_bytes(part, layout)
    assert not [each for each in over if each.loop]
