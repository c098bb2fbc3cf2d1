"""Methods whose averages are quantised: what crosses `replica`, and what becomes of the parameters."""

from functools import cache

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
from haliax import Axis, NamedArray

from gregale.audit import audit
from gregale.audit.traffic import bytes_by_axes
from gregale.axes.layout import REPLICA
from gregale.codecs.config import ReduceConfig
from gregale.communication.reduce import ExactReducer
from gregale.methods.diloco import Diloco
from gregale.methods.psdp import Psdp
from gregale.methods.schedule import Schedule
from gregale.model.config import LlamaConfig
from gregale.model.llama import Llama
from gregale.optim import AdamWConfig
from gregale.training.state import abstract_state, initial_state
from gregale.training.stepper import Stepper
from tests.mesh.support import executed, layout_of, placed, token_batch

FOUR_BITS = ReduceConfig(codec="int4", gather_codec="int4")
LAYERS = 2
# Large enough that blocks are full in every array; it is compiled for, never held.
WIDE = LlamaConfig(layers=LAYERS, hidden=512, heads=8, mlp=1024)
FLOAT32 = 4


def llama(config: LlamaConfig = WIDE):
    return jax.eval_shape(lambda key: Llama.init(config, Axis("vocab", 64), key), jax.random.key(0))


def psdp_on(layout, model, reduce: ReduceConfig = FOUR_BITS) -> Psdp:
    execution = executed(layout.inside(REPLICA))
    built = AdamWConfig(learning_rate=1e-2).build(model, 100, layout)
    return Psdp(model, lambda model, batch: model.loss(batch, execution), built, layout, 2, reduce=reduce)


def test_a_psdp_step_sends_bytes_alone_and_as_many_as_the_closed_form_says():
    """With blocks that are full; `tests/programs/test_plan_diloco.py` has other methods and blocks that are not."""
    layout, model = layout_of(8, 1, 1), llama()
    method = psdp_on(layout, model)
    batch = layout.abstract(token_batch(), layout.compute)
    program = Stepper(method, model).program.lower(abstract_state(method, model), batch).compile()
    over = audit(program, layout.mesh).over(REPLICA)
    assert {each.dtype for each in over} == {"u8"}, [each for each in over if each.dtype != "u8"]
    assert not [each for each in over if each.loop]
    assert sum(each.bytes for each in over) == bytes_by_axes(method.traffic(None).averages)[REPLICA,]
    sent = sum(each.bytes_sent for each in over)
    assert sent - 3 * FLOAT32 * (layout.replicas - 1) == method.bytes_sent(1)
    assert ExactReducer(layout).bytes_sent(model) / sent >= 7.5, "4 bits and block 64 on both legs, beside float32"


Layers, Embed, Mlp, Rows = Axis("layers", LAYERS), Axis("embed", 16), Axis("mlp", 16), Axis("batch", 32)


class Net(eqx.Module):
    """x -> readout . (x + tanh(x up) down, layer after layer): few arrays, so that steps are quick to compile."""

    up: NamedArray  # [layers, embed, mlp]
    down: NamedArray  # [layers, mlp, embed]
    readout: NamedArray  # [embed]

    @staticmethod
    def init() -> "Net":
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = (Layers, Embed, Mlp), (Layers, Mlp, Embed), (Embed,)
        return Net(*(0.3 * hax.random.normal(key, axes) for key, axes in zip(keys, shapes, strict=True)))


def squared_error(net: Net, batch):
    def layer(x, up, down):
        return (x + hax.dot(hax.tanh(hax.dot(x, up, axis=Embed)), down, axis=Mlp)).rearrange(x.axes)

    out = hax.dot(hax.fold(layer, Layers)(batch["x"], net.up, net.down), net.readout, axis=Embed)
    error = batch["factor"] * (out - batch["y"])
    return hax.sum(error * error).scalar(), hax.sum(hax.ones_like(error)).scalar()


def rows_of(layout, step: int, factor: float = 1.0):
    """Rows of which y is a function of x; `factor` multiplies the errors."""
    x = np.random.default_rng(step).normal(size=(Rows.size, Embed.size)).astype(np.float32)
    batch = {"x": hax.named(x, (Rows, Embed)), "y": hax.named(np.sin(x.sum(axis=1)), Rows)}
    return placed({**batch, "factor": hax.full(Rows, factor)}, layout, layout.compute)


def net_on(layout, reduce: ReduceConfig) -> Psdp:
    built = AdamWConfig(learning_rate=1e-2).build(jax.eval_shape(Net.init), 100, layout)
    return Psdp(jax.eval_shape(Net.init), squared_error, built, layout, 2, reduce=reduce)


@cache
def trained(kind: str, steps: int, reduce: ReduceConfig = FOUR_BITS):
    """The method, the state and the losses after some steps of `Net` on 4 replicas x data 2."""
    layout = layout_of(4, 2, 1)
    method = net_on(layout, reduce)
    if kind == "diloco":
        inner = net_on(layout.inside(REPLICA), ReduceConfig())
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        method = Diloco(inner, outer, layout, Schedule(4, 2, 2, LAYERS), mixing=0.5, reduce=reduce)
    state, stepper, losses = initial_state(method, Net.init), Stepper(method, jax.eval_shape(Net.init)), []
    for step in range(1, steps + 1):
        state, report = stepper(state, rows_of(layout, step), step)
        losses.append(float(np.mean(jax.device_get(report.metrics.loss))))
    return method, state, losses


def copies_differ(array: jax.Array) -> bool:
    """Whether any two devices hold different bits for the same part of an array."""
    held: dict = {}
    for shard in array.addressable_shards:
        held.setdefault(str(shard.index), []).append(np.asarray(shard.data).tobytes())
    return any(len(set(copies)) > 1 for copies in held.values())


def test_replicas_stay_equal_to_the_last_bit_over_100_steps():
    _, state, losses = trained("psdp", 100)
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
    _, _, exact = trained("psdp", 20, ReduceConfig())
    _, _, quantised = trained("psdp", 20, ReduceConfig(codec="int8", gather_codec="int8"))
    np.testing.assert_allclose(quantised, exact, rtol=0.01)
    _, _, rough = trained("psdp", 20, ReduceConfig(codec="int2", gather_codec="int4", feedback=None))
    assert np.abs(np.subtract(rough, exact) / exact).max() > 0.02, "two bits can be told from 32"


def test_a_step_that_is_not_finite_changes_nothing_and_loses_no_error():
    method, state, _ = trained("psdp", 100)
    step = jax.jit(method.step)
    state, metrics = step(state.method, rows_of(method.layout, 100))
    assert metrics.finite
    assert any(np.any(np.asarray(stored.scales.array, np.float32)) for stored in state.error.first.values())
    after, metrics = step(state, rows_of(method.layout, 101, factor=np.inf))
    assert not metrics.finite
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old))
