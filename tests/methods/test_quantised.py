"""Methods whose averages are quantised: what crosses `replica`, and what becomes of the parameters."""

from functools import cache

import jax
import numpy as np
import pytest

from gregale.axes.layout import REPLICA
from gregale.codecs.codec import ReduceConfig
from gregale.communication.reduce import ExactReducer
from gregale.cost import audit
from gregale.training.state import Stepper, abstract_state, initial_state
from tests.mesh.support import layout_of
from tests.methods.islands import Net, batch_of, psdp_on, rows

FOUR_BITS = ReduceConfig(codec="int4", gather_codec="int4")
FLOAT32 = 4


@cache
def trained(steps: int, reduce: ReduceConfig = FOUR_BITS):
    """The method, the state and the losses after some steps of `Net` on 4 replicas x data 2."""
    method = psdp_on(layout_of(4, 2, 1), reduce, 1e-2, microbatches=2)
    state, stepper, losses = initial_state(method, Net.init), Stepper(method, jax.eval_shape(Net.init)), []
    for step in range(1, steps + 1):
        state, report = stepper(state, batch_of(rows(step % 4, 8), method.layout), step)
        losses.append(float(report.metrics.loss))
    return method, state, losses


def test_a_psdp_step_sends_bytes_alone_and_as_many_as_the_closed_form_says():
    """With blocks that are full; `tests/programs/test_plan_diloco.py` has other methods and blocks that are not."""
    method, _, _ = trained(20)
    layout, model = method.layout, jax.eval_shape(Net.init)
    batch = batch_of(rows(0, 8), layout)
    program = Stepper(method, model).program.lower(abstract_state(method, model), batch).compile()
    over = audit(program, layout.mesh).over(REPLICA)
    assert {each.dtype for each in over} == {"u8"}, [each for each in over if each.dtype != "u8"]
    assert not [each for each in over if each.loop]
    sent = sum(each.bytes_sent for each in over)
    assert sent - 3 * FLOAT32 * (layout.replicas - 1) == method.bytes_sent(1)
    assert ExactReducer(layout).bytes_sent(model) / sent == pytest.approx(4 / 0.53125, rel=0.03), "but for the readout"


def copies_differ(array: jax.Array) -> bool:
    """Whether any two devices hold different bits for the same part of an array."""
    held: dict = {}
    for shard in array.addressable_shards:
        held.setdefault(str(shard.index), []).append(np.asarray(shard.data).tobytes())
    return any(len(set(copies)) > 1 for copies in held.values())


def test_replicas_stay_equal_to_the_last_bit_over_100_steps():
    _, state, losses = trained(100)
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5]), "it trains"
    arrays = jax.tree.leaves(state.method.parameters)
    assert len(arrays[0].addressable_shards) == 8
    assert not [array for array in arrays if copies_differ(array)]


def test_copies_that_differ_would_be_seen():
    layout = layout_of(2, 1, 1)
    differing = [jax.device_put(np.float32([n]), device) for n, device in enumerate(layout.mesh.devices.flat)]
    array = jax.make_array_from_single_device_arrays((1,), layout.sharding((), {}), differing)
    assert copies_differ(array)


def test_eight_bits_train_as_float32_does():
    _, _, exact = trained(20, ReduceConfig())
    _, _, quantised = trained(20, ReduceConfig(codec="int8", gather_codec="int8"))
    np.testing.assert_allclose(quantised, exact, rtol=0.01)
    _, _, rough = trained(20, ReduceConfig(codec="int2", gather_codec="int4", feedback=None))
    assert np.abs(np.subtract(rough, exact) / exact).max() > 0.02, "two bits can be told from 32"


def test_a_step_that_is_not_finite_changes_nothing_and_loses_no_error():
    method, state, _ = trained(100)
    step = jax.jit(method.step)
    state, metrics = step(state.method, batch_of(rows(0, 8), method.layout))
    assert metrics.finite
    assert any(np.any(np.asarray(stored.scales.array, np.float32)) for stored in state.error.first.values())
    after, metrics = step(state, batch_of({**rows(1, 8), "y": np.full(32, np.inf, np.float32)}, method.layout))
    assert not metrics.finite
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old))
