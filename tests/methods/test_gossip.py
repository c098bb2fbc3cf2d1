"""The example of a method of one's own, against a slow rewrite in NumPy, and what its program sends."""

import haliax as hax
import jax
import numpy as np
import optax
import pytest
from haliax import Axis

from gregale.axes.layout import MeshConfig, make_mesh, standard_layout
from gregale.cost import audit
from gregale.errors import UserError
from gregale.methods.psdp import Psdp
from gregale.optim import Optimizer
from gregale.training.state import Stepper, initial_state
from tests.methods.test_diloco import INNER_RATE, ROWS, SCALES, first_model, named_batch, rows, squared_error
from tests.plugins import EXAMPLES, plugins_from

STEPS = 7


def made(replicas: int, data: int, period: int = 1):
    with plugins_from(EXAMPLES):
        from gossip import Gossip  # type: ignore[import-not-found]
    mesh = MeshConfig(replica=replicas, data=data)
    layout = standard_layout(make_mesh(mesh, jax.devices()[: replicas * data]))
    inner = Psdp(first_model(), squared_error, Optimizer.of(optax.sgd(INNER_RATE)), layout.inside("replica"))
    return Gossip(inner, layout, period)


def slow(replicas: int, period: int, steps: int) -> list[np.ndarray]:
    """The algorithm as it is written down, in float64: [layer and rest, embed] of each replica."""
    model, scales = first_model(), np.append(SCALES, 1.0)
    theta = np.concatenate([model.stacked.array, model.rest.array[None]]).astype(float)
    own, hops = [theta.copy() for _ in range(replicas)], int(np.ceil(np.log2(replicas)))
    for t in range(1, steps + 1):
        count, values = ROWS // replicas, rows(t, uneven=replicas == 4)
        for k in range(replicas):
            x, y, mask = (values[name][k * count : (k + 1) * count].astype(float) for name in ("x", "y", "mask"))
            error = x @ (scales @ own[k]) - y
            own[k] = own[k] - INNER_RATE * scales[:, None] * (2 * (mask * error) @ x / mask.sum())
        if t % period == 0:
            hop = 2 ** (t // period % hops)
            own = [(own[k] + own[(k - hop) % replicas]) / 2 for k in range(replicas)]
    return own


QUICK = pytest.param(2, 2, 3, marks=pytest.mark.quick)


@pytest.mark.parametrize(("replicas", "data", "period"), [(4, 2, 1), QUICK, (8, 1, 1)])
def test_replicas_are_those_of_the_slow_rewrite(replicas, data, period):
    method, model = made(replicas, data, period), first_model()
    state, take = initial_state(method, lambda: model), Stepper(method, model)
    for t in range(1, STEPS + 1):
        state, _ = take(state, named_batch(rows(t, uneven=replicas == 4)), t)
        jax.block_until_ready(state)
    found, expected = state.method.inner.parameters, slow(replicas, period, STEPS)
    for k in range(replicas):
        own = [*found.stacked["replica", k].array, found.rest["replica", k].array]
        np.testing.assert_allclose(own, expected[k], rtol=2e-5, atol=1e-6)
    mean = method.eval_model(state.method)
    np.testing.assert_allclose([*mean.stacked.array, mean.rest.array], np.mean(expected, axis=0), rtol=2e-5, atol=1e-6)
    again = method.from_psdp(method.to_psdp(state.method), STEPS).inner.parameters
    np.testing.assert_allclose(again.rest["replica", 1].array, np.mean(expected, axis=0)[-1], rtol=2e-5, atol=1e-6)


def test_a_step_sends_the_parameters_once_over_replica_to_one_peer():
    method, model = made(2, 2), first_model()
    state, batch = initial_state(method, lambda: model), named_batch(rows(1))
    program = Stepper(method, model).program.lower(state, batch, *method.actions(1).step_args).compile()
    (sent,) = {each.kind for each in audit(program, method.layout.mesh).over("replica")}
    assert sent == "collective-permute"
    assert audit(program, method.layout.mesh).bytes_per_step("replica") == method.bytes_sent(1) == 6 * 8 * 4 / 2
    assert method.bytes_sent(10) == 10 * method.bytes_sent(1)


@pytest.mark.quick
def test_steps_without_training_average_all_replicas_exactly():
    method = made(8, 1)
    values = hax.named(np.arange(8.0) ** 2, Axis("replica", 8))
    for t in range(3):
        mixed, _ = jax.jit(method.mix)({"a": values}, None, method.due(t))
        values = mixed["a"]
    np.testing.assert_array_equal(values.array, np.full(8, np.mean(np.arange(8.0) ** 2)))


@pytest.mark.quick
def test_sign_diloco_is_that_of_the_slow_rewrite():
    """Written from the page alone, with a state of its own: theta and its momentum."""
    with plugins_from(EXAMPLES):
        from sign_diloco import SignDiloco  # type: ignore[import-not-found]
    gossip, model = made(4, 2), first_model()
    method = SignDiloco(gossip.inner, gossip.layout, period=3, rate=0.01, momentum=0.5)
    state, take = initial_state(method, lambda: model), Stepper(method, model)
    theta = np.concatenate([model.stacked.array, model.rest.array[None]]).astype(float)
    own, velocity, scales = [theta.copy() for _ in range(4)], np.zeros_like(theta), np.append(SCALES, 1.0)
    for t in range(1, STEPS + 1):
        values = rows(t, uneven=True)
        state, _ = take(state, named_batch(values), t)
        jax.block_until_ready(state)
        for k in range(4):
            x, y, mask = (np.split(values[name], 4)[k].astype(float) for name in ("x", "y", "mask"))
            error = x @ (scales @ own[k]) - y
            own[k] = own[k] - INNER_RATE * scales[:, None] * (2 * (mask * error) @ x / mask.sum())
        if t % 3 == 0:
            velocity = 0.5 * velocity + np.mean([np.sign(theta - each) for each in own], axis=0)
            theta = theta - 0.01 * velocity
            own = [theta.copy() for _ in range(4)]
    for k in range(4):
        found = state.method.inner.parameters
        np.testing.assert_allclose([*found.stacked["replica", k].array], own[k][:-1], rtol=2e-5, atol=1e-6)
    mean = method.eval_model(state.method)
    np.testing.assert_allclose([*mean.stacked.array, mean.rest.array], theta, rtol=2e-5, atol=1e-6)
    program = take.program.lower(state, named_batch(rows(1)), *method.actions(3).step_args).compile()
    sent = audit(program, method.layout.mesh).over("replica")
    assert sum(each.bytes_sent for each in sent) == method.bytes_sent(3)


WRONG = {
    "one value": ("mix", lambda method, theta, own, due: theta, r"Wrong.mix has to return the pair"),
    "no copies": (
        "mix",
        lambda method, theta, own, due: (method.replicas.average(theta), own),
        r"`self.replicas.copies`",
    ),
    "other state": ("mix", lambda method, theta, own, due: (theta, theta), r"Wrong.mix has to return the pair"),
    "pair": ("joined", lambda method, theta, own: (theta, own), r"Wrong.joined has to return one model's parameters"),
    "text": ("due", lambda method, step: "x", r"Wrong.due has to return arrays or None; it returns 'x'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_method_that_returns_something_else_is_refused(wrong):
    name, function, message = WRONG[wrong]
    method, batch = made(2, 1), named_batch(rows(1))
    own = type("Wrong", (type(method),), {name: function})(method.inner, method.layout, 1)

    def uses():
        actions, state = own.actions(1), jax.eval_shape(own.init)
        jax.eval_shape(own.step, state, batch, *actions.step_args)
        jax.eval_shape(own.to_psdp, state)

    with pytest.raises(UserError, match=message):
        uses()
