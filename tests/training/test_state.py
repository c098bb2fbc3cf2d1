"""Steps that are not finite: skipped without a trace in the state, and counted."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gregale.methods.average import Average
from gregale.methods.psdp import Psdp
from gregale.optim import Optimizer
from gregale.training.state import Stepper, abstract_state, initial_state, state_shardings
from tests.mesh.support import layout_of

ROWS = 8


class Line(eqx.Module):
    """y = slope * x."""

    slope: jax.Array  # [4]


def loss(line: Line, batch):
    x, y, weight = batch
    return jnp.sum(weight * (x @ line.slope - y) ** 2), jnp.sum(weight)


def batch(number: int, poison: float | None = None, weight: float = 1.0):
    generator = np.random.default_rng(number)
    x = generator.standard_normal((ROWS, 4)).astype(np.float32)
    y = x.sum(axis=1)
    if poison is not None:
        y[3] = poison
    return jnp.asarray(x), jnp.asarray(y), jnp.full(ROWS, weight, jnp.float32)


class Training:
    """A run of a toy, with the state's bytes after every step."""

    def __init__(self):
        line = Line(jnp.zeros(4))
        method = Psdp(line, loss, Optimizer.of(optax.adam(0.1)), layout_of(replica=2, data=2))
        self.shardings = state_shardings(method, abstract_state(method, line))
        self.state = initial_state(method, lambda: line)
        self.step = Stepper(method, line)
        self.count = 0

    def take(self, batch):
        self.count += 1
        self.state, report = self.step(self.state, batch, self.count)
        return jax.device_get(report)

    def bits(self) -> list[bytes]:
        """Parameters and optimizer state, without the counters."""
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(self.state.method)]


@pytest.fixture(scope="module")
def trained() -> Training:
    training = Training()
    for number in range(3):
        training.take(batch(number))
    return training


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30], ids=["nan", "infinity", "overflow"])
def test_a_step_that_is_not_finite_changes_no_bit(trained, poison):
    before, skipped = trained.bits(), int(trained.state.skipped)
    report = trained.take(batch(9, poison))
    assert not np.isfinite(report.metrics.loss)
    assert trained.bits() == before
    assert int(trained.state.step) == trained.count
    assert (int(report.skipped), int(report.skipped_in_a_row)) == (skipped + 1, 1)
    report = trained.take(batch(10))
    assert trained.bits() != before, "a finite step moves it"
    assert (int(report.skipped), int(report.skipped_in_a_row)) == (skipped + 1, 0)


def test_a_batch_without_any_weight_has_the_gradient_0_and_is_a_step(trained):
    skipped, report = int(trained.state.skipped), trained.take(batch(11, weight=0.0))
    assert (float(report.metrics.loss), float(report.metrics.grad_norm)) == (0, 0)
    assert int(report.skipped) == skipped


def test_it_is_as_if_the_skipped_batches_had_not_been_there():
    clean, dirty = Training(), Training()
    for number in range(4):
        clean.take(batch(number))
        dirty.take(batch(number))
        in_a_row = [int(dirty.take(batch(number, np.nan)).skipped_in_a_row) for _ in range(number)]
        assert in_a_row == list(range(1, number + 1))
    assert dirty.bits() == clean.bits()
    assert (int(clean.state.skipped), int(dirty.state.skipped)) == (0, 6)
    assert (int(clean.state.step), int(dirty.state.step)) == (4, 10)


def test_the_state_stays_where_it_belongs(trained):
    for leaf, sharding in zip(jax.tree.leaves(trained.state), jax.tree.leaves(trained.shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_an_average_has_parameters_from_its_beginning_and_none_of_them_after_its_first_addition():
    average = Average.begin({"a": jnp.asarray([3.0, -1.0])})
    found = [
        average,
        *(average := average.with_added({"a": jnp.asarray(value)}, 0.9) for value in ([5.0, 0.0], [7.0, 2.0])),
    ]
    expected = [3.0, -1.0], [5.0, 0.0], [5 + 2 / 1.9, 2 / 1.9]
    np.testing.assert_allclose([each.parameters["a"] for each in found], expected, rtol=1e-5)
