"""Methods that join replicas, each of which has a pipeline, on a small module beside its unpipelined twin."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import NamedArray

from gregale.axes.layout import REPLICA, Layout
from gregale.codecs.codec import ReduceConfig
from gregale.communication.pipeline import Pipeline, Schedule
from gregale.cost import Audit, audit
from gregale.methods.diloco import Diloco
from gregale.methods.method import Method
from gregale.methods.psdp import Psdp
from gregale.methods.schedule import Schedule as OuterSchedule
from gregale.optim import Optimizer
from gregale.training.state import Stepper, initial_state
from tests.communication.pipeline.test_stack import TOLERANCE, Embed, plain, problem, stack_of
from tests.mesh.support import layout_of, placed

LAYER_COUNT, ROWS, STEPS = 4, 32, 3
MODEL = {
    "layers": problem(LAYER_COUNT, ROWS)[0],
    "readout": hax.named(np.linspace(-1, 1, Embed.size, dtype=np.float32), Embed),
}
Stack = Callable[[Any, NamedArray, Any], NamedArray]


def loss_by(stack: Stack):
    def loss(model: dict, batch: dict) -> tuple[jax.Array, jax.Array]:
        extras = {name: batch[name] for name in ("positions", "segment_ids")}
        x, _ = stack(model["layers"], batch["inputs"], extras)
        out = hax.dot(x, model["readout"], axis="embed")
        return hax.sum(hax.square(out - batch["factors"]["embed", 0])).scalar(), jnp.float32(out.size)

    return loss


@dataclass
class Outcome:
    losses: list
    parameters: list[np.ndarray]  # after the last step
    audit: Audit  # of the step


def trained(method: Method, layout: Layout) -> Outcome:
    """A few steps on the toy's rows, in another order each time."""
    _, inputs, extras, factors = problem(LAYER_COUNT, ROWS)
    state, stepper = initial_state(method, lambda: MODEL), Stepper(method, MODEL)
    outcome = Outcome([], [], Audit(()))
    for step in range(1, STEPS + 1):
        order = np.random.default_rng(step).permutation(ROWS)
        rows = {"inputs": inputs, "factors": factors, **extras}
        mixed = {name: NamedArray(leaf.array[order], leaf.axis_names) for name, leaf in rows.items()}
        batch = placed(mixed, layout, layout.compute)
        if step == 1:
            compiled = stepper.program.lower(state, batch, *method.actions(1).step_args).compile()
            outcome.audit = audit(compiled, layout.mesh)
        state, report = stepper(state, batch, step)
        outcome.losses.append(np.asarray(report.metrics.loss))
    inner = state.method if isinstance(method, Psdp) else state.method.inner
    outcome.parameters = jax.tree.leaves(jax.device_get(inner.parameters))
    return outcome


def pipelined_and_plain(method_on: Callable[[Layout, Any], Method]) -> tuple[Outcome, Outcome]:
    """The same method with a pipeline, and with a plain loop where the pipeline's stages are more of `data`."""
    stages, twin = layout_of(replica=2, stage=2, data=2), layout_of(replica=2, data=4)
    stack = stack_of(Pipeline(Schedule(2, 4, 2), stages.inside_replica()))
    return trained(method_on(stages, loss_by(stack)), stages), trained(method_on(twin, loss_by(plain)), twin)


def test_quantised_averages():
    """Both split `embed` in eight, so that they quantise the same blocks.

    A gradient that differs in its last bits may get the next code. It is then off by a step, a fifteenth of what its
    block spans, and its parameter by the learning rate times that.
    """
    methods = []

    def psdp(layout: Layout, loss) -> Psdp:
        reduce = ReduceConfig(codec="int4", gather_codec="int4")
        methods.append(Psdp(MODEL, loss, Optimizer.of(optax.sgd(0.01)), layout, microbatches=2, reduce=reduce))
        return methods[-1]

    found, exact = pipelined_and_plain(psdp)
    np.testing.assert_allclose(found.losses[0], exact.losses[0], rtol=TOLERANCE)
    np.testing.assert_allclose(found.losses, exact.losses, rtol=1e-3)
    for left, right in zip(found.parameters, exact.parameters, strict=True):
        assert np.mean(~(np.abs(left - right) <= TOLERANCE)) < 0.01, "nearly all codes are the same"
    over_replica = found.audit.over(REPLICA)
    assert {(each.dtype, each.axes, each.loop) for each in over_replica} == {("u8", (REPLICA,), ())}
    sent = sum(each.bytes_sent * (each.times or 0) for each in over_replica)
    scalars = 3 * 4  # loss, weight and norm of the other replica
    assert sent - scalars == methods[0].bytes_sent(1)


def test_streaming_diloco():
    """What is joined after step 2 is in the loss of step 3.

    That is layers 1 and 3 (fragments count layers, not stages), and the readout after step 3.
    """
    schedule = OuterSchedule(period=3, fragments=3, delay=1, layers=LAYER_COUNT)

    def diloco(layout: Layout, loss) -> Diloco:
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        return Diloco.of(MODEL, loss, optax.sgd(0.01), outer, layout, schedule, mixing=0.5)

    found, exact = pipelined_and_plain(diloco)
    np.testing.assert_allclose(found.losses, exact.losses, rtol=TOLERANCE)
    for left, right in zip(found.parameters, exact.parameters, strict=True):
        np.testing.assert_allclose(left, right, atol=TOLERANCE)
    assert found.audit.over(REPLICA) == ()
