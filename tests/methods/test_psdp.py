"""PSDP on a module and a loss that are no language model: a linear regression in plain arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gregale.methods.psdp import Psdp
from gregale.optim import ConstantSchedule, LionConfig, SgdConfig
from tests.mesh.support import layout_of

STEPS, ROWS = 8, 32


class Line(eqx.Module):
    """y = slope * x + offset."""

    slope: jax.Array
    offset: jax.Array
    name: str = eqx.field(static=True, default="line")
    points_seen: jax.Array = eqx.field(default_factory=lambda: jnp.zeros((), jnp.int32))

    def __call__(self, x):
        return self.slope * x + self.offset


def loss(line: Line, batch):
    """(weighted sum of squared errors, sum of weights)."""
    x, y, weight = batch
    return jnp.sum(weight * (line(x) - y) ** 2), jnp.sum(weight)


def batches():
    generator = np.random.default_rng(0)
    for _ in range(STEPS):
        x = generator.standard_normal(ROWS).astype(np.float32)
        y = 3 * x - 1 + 0.1 * generator.standard_normal(ROWS).astype(np.float32)
        yield jnp.asarray(x), jnp.asarray(y), jnp.linspace(0, 1, ROWS)


def new_line() -> Line:
    return Line(jnp.float32(0.5), jnp.float32(0.0))


def plain_optax() -> tuple[list[float], float, float]:
    parameters = {"slope": jnp.float32(0.5), "offset": jnp.float32(0.0)}
    optimizer = optax.sgd(0.1, momentum=0.5)
    state, losses = optimizer.init(parameters), []

    def mean(parameters, x, y, weight):
        error = parameters["slope"] * x + parameters["offset"] - y
        return jnp.sum(weight * error**2) / jnp.sum(weight)

    for batch in batches():
        value, gradients = jax.value_and_grad(mean)(parameters, *batch)
        updates, state = optimizer.update(gradients, state)
        parameters = optax.apply_updates(parameters, updates)
        losses.append(float(value))
    return losses, float(parameters["slope"]), float(parameters["offset"])


@pytest.mark.quick
@pytest.mark.parametrize(("sizes", "microbatches"), [((1, 1, 1), 1), ((4, 2, 1), 2)])
def test_a_linear_regression_equals_plain_optax(sizes, microbatches):
    line = new_line()
    config = SgdConfig(learning_rate=0.1, momentum=0.5, schedule=ConstantSchedule(), clip_norm=None)
    optimizer = config.build(eqx.filter(line, eqx.is_inexact_array), STEPS)
    method = Psdp(line, loss, optimizer, layout_of(*sizes), microbatches)
    state, step, losses = jax.jit(method.init)(), jax.jit(method.step), []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
        assert float(metrics.weight) == pytest.approx(ROWS / 2)
    expected_losses, slope, offset = plain_optax()
    np.testing.assert_allclose(losses, expected_losses, atol=1e-5)
    trained = method.eval_model(state)
    assert float(trained.slope) == pytest.approx(slope, abs=1e-5)
    assert float(trained.offset) == pytest.approx(offset, abs=1e-5)
    assert losses[-1] < losses[0] / 5


@pytest.mark.quick
def test_a_direction_is_clipped_by_its_own_norm():
    """Lion's direction has the norm sqrt(2) of two signs, whatever the gradient's."""
    given = {"learning_rate": 0.1, "weight_decay": 0.0, "clip_norm": None, "clip_update_norm": 0.5}
    config = LionConfig(**given, schedule=ConstantSchedule())
    method = Psdp(new_line(), loss, config.build(eqx.filter(new_line(), eqx.is_inexact_array), STEPS), layout_of(4, 2))
    line = method.eval_model(jax.jit(method.step)(jax.jit(method.init)(), next(batches()))[0])
    moved = np.array([float(line.slope) - 0.5, float(line.offset)])
    np.testing.assert_allclose(np.abs(moved), 0.1 * 0.5 / np.sqrt(2), rtol=1e-5)


def test_microbatches_devices_and_whole_batches_without_a_target_give_no_nan():
    """Of 8 parts (replica 2 x data 2 x 2 microbatches) one has targets, then none."""
    (x, y, _), line = next(batches()), new_line()
    optimizer = SgdConfig(learning_rate=0.1, momentum=0, schedule=ConstantSchedule(), clip_norm=None)
    method = Psdp(line, loss, optimizer.build(eqx.filter(line, eqx.is_inexact_array), STEPS), layout_of(2, 2, 1), 2)
    step, state = jax.jit(method.step), jax.jit(method.init)()
    few = jnp.asarray(np.arange(ROWS) < 3, jnp.float32)
    moved, metrics = step(state, (x, y, few))
    slope = 0.5 - 0.1 * np.mean(2 * (0.5 * x[:3] - y[:3]) * x[:3])
    assert float(method.eval_model(moved).slope) == pytest.approx(float(slope), abs=1e-6)
    after, metrics = step(moved, (x, y, 0 * few))
    assert (float(metrics.loss), float(metrics.weight), bool(metrics.finite)) == (0, 0, True)
    assert float(method.eval_model(after).slope) == float(method.eval_model(moved).slope)


def test_what_is_not_a_parameter_stays_as_it_is():
    """Integers and static fields of the module are neither trained nor lost."""
    line = new_line()
    optimizer = SgdConfig(schedule=ConstantSchedule()).build(eqx.filter(line, eqx.is_inexact_array), STEPS)
    method = Psdp(line, loss, optimizer, layout_of())
    state, metrics = jax.jit(method.step)(jax.jit(method.init)(), next(batches()))
    trained = method.eval_model(state)
    assert (trained.name, trained.points_seen.dtype, int(trained.points_seen)) == ("line", jnp.int32, 0)
    assert float(trained.slope) != 0.5
    gradient = jax.grad(lambda line, batch: loss(line, batch)[0] / loss(line, batch)[1], allow_int=True)
    norm = np.hypot(*(float(getattr(gradient(line, next(batches())), name)) for name in ("slope", "offset")))
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-5)
