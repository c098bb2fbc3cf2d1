"""DiLoCo and Streaming DiLoCo against numbers worked out by hand, in plain floats, through the documented call."""

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
import pytest
from haliax import Axis, NamedArray

from gregale.axes.layout import MeshConfig, make_mesh, standard_layout
from gregale.errors import UserError
from gregale.methods.diloco import Diloco
from gregale.methods.schedule import Schedule
from gregale.training.state import Stepper, initial_state

Batch, Layers = Axis("batch", 2), Axis("layers", 2)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


class Line(eqx.Module):
    slope: NamedArray  # []
    intercept: NamedArray  # []


class Stack(eqx.Module):
    weights: NamedArray  # [Layers]
    rest: NamedArray  # []


def line_loss(line: Line, batch):
    return squared(line.slope * batch["x"] + line.intercept - batch["y"])


def stack_loss(stack: Stack, batch):
    return squared(hax.sum(stack.weights, Layers) + stack.rest - batch["y"])


def squared(error: NamedArray):
    return hax.sum(error * error).scalar(), np.float32(error.size)


def layout_of_two():
    return standard_layout(make_mesh(MeshConfig(replica=2), jax.devices()[:2]))


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-6)


@pytest.mark.quick
def test_two_rounds_of_diloco():
    """H = 2. Replica 0 has the point (2, 2), replica 1 (1, 5); error e moves (slope, intercept) by -0.1 e (x, 1)."""
    line = Line(hax.zeros(()), hax.zeros(()))
    method = Diloco.of(line, line_loss, optax.sgd(0.05), OUTER, layout_of_two(), Schedule(period=2))
    batch = {"x": hax.named(np.float32([2, 1]), Batch), "y": hax.named(np.float32([2, 5]), Batch)}
    state, stepper = initial_state(method, lambda: line), Stepper(method, line)

    def take(step: int) -> np.ndarray:
        nonlocal state
        state, _ = stepper(state, batch, step)
        own = state.method.inner.parameters
        return np.stack([own.slope.array, own.intercept.array])  # [parameter, replica]

    # errors -2 and -5
    close(take(1), [[0.4, 0.5], [0.2, 0.5]])
    # errors -1 and -4: slopes 0.6 and 0.9, intercepts 0.3 and 0.9; means 0.75 and 0.6 = minus the pseudo-gradient
    first = 0.7 * (0.75 + 0.9 * 0.75), 0.7 * (0.6 + 0.9 * 0.6)
    assert first == pytest.approx((0.9975, 0.798))
    close(take(2), [[0.9975] * 2, [0.798] * 2])
    # errors 0.793 and -3.2045
    close(take(3), [[0.9975 - 0.2 * 0.793, 0.9975 + 0.1 * 3.2045], [0.798 - 0.1 * 0.793, 0.798 + 0.1 * 3.2045]])
    # What reads the model now has one more round, of the third step alone, which the state does not have.
    slope, intercept = 0.9975 - (0.8389 + 1.31795) / 2, 0.798 - (0.7187 + 1.11845) / 2
    read = method.eval_model(state.method)
    close(read.slope.array, 0.9975 - 0.7 * (slope + 0.9 * (0.9 * -0.75 + slope)))
    close(read.intercept.array, 0.798 - 0.7 * (intercept + 0.9 * (0.9 * -0.6 + intercept)))
    # errors 0.3965 and -2.5636: slopes 0.7596 and 1.57431, intercepts 0.67905 and 1.37481
    slope, intercept = 0.9975 - (0.7596 + 1.57431) / 2, 0.798 - (0.67905 + 1.37481) / 2
    assert (slope, intercept) == pytest.approx((-0.169455, -0.22893))
    slope_momentum, intercept_momentum = 0.9 * -0.75 + slope, 0.9 * -0.6 + intercept
    second = 0.9975 - 0.7 * (slope + 0.9 * slope_momentum), 0.798 - 0.7 * (intercept + 0.9 * intercept_momentum)
    assert second == pytest.approx((1.64812515, 1.4426769))
    close(take(4), [[second[0]] * 2, [second[1]] * 2])
    trained = method.eval_model(state.method)
    close([trained.slope.array, trained.intercept.array], second)


@pytest.mark.quick
def test_more_than_a_period_of_streaming():
    """H = P = 3, tau = 1, alpha = 1/4; targets 4 and 8, and an error e moves each of three parameters by -e / 4.

    After steps 1, 2, 3, 4 the second weight, the rest, the first weight, and the second weight again are sent; each is
    applied a step later.
    """
    stack = Stack(hax.zeros(Layers), hax.zeros(()))
    schedule = Schedule(period=3, fragments=3, delay=1, layers=2)
    method = Diloco.of(stack, stack_loss, optax.sgd(0.125), OUTER, layout_of_two(), schedule, mixing=0.25)
    batch = {"y": hax.named(np.float32([4, 8]), Batch)}
    state, stepper = initial_state(method, lambda: stack), Stepper(method, stack)

    def take(step: int) -> np.ndarray:
        nonlocal state
        state, _ = stepper(state, batch, step)
        own = state.method.inner.parameters
        weights = own.weights.rearrange(("layers", "replica")).array
        return np.concatenate([weights, own.rest.array[None]])  # [first weight, second weight, rest; replica]

    # 1: errors -4 and -8. The second weights, 1 and 2, are sent: minus the pseudo-gradient is 1.5.
    close(take(1), [[1, 2], [1, 2], [1, 2]])
    second = 0.7 * (1.5 + 0.9 * 1.5)

    # 2: errors -1 and -2. The second weight is applied. The rests, 1.25 and 2.5, are sent.
    seconds = 0.25 * 1.25 + 0.75 * second, 0.25 * 2.5 + 0.75 * second
    assert seconds == pytest.approx((1.80875, 2.12125))
    close(take(2), [[1.25, 2.5], seconds, [1.25, 2.5]])
    rest = 0.7 * (1.875 + 0.9 * 1.875)

    # 3: errors 0.30875 and -0.87875. The rest is applied. The first weights are sent.
    left, right = 0.30875 / 4, 0.87875 / 4
    firsts = 1.25 - left, 2.5 + right
    seconds = 1.80875 - left, 2.12125 + right
    rests = 0.25 * (1.25 - left) + 0.75 * rest, 0.25 * (2.5 + right) + 0.75 * rest
    assert rests == pytest.approx((2.163515625, 2.550234375))
    close(take(3), [firsts, seconds, rests])
    mean = (firsts[0] + firsts[1]) / 2
    first = 0.7 * (mean + 0.9 * mean)

    # 4: errors 1.067890625 and -0.389140625. The first weight is applied. The second weights are sent again.
    left, right = 1.067890625 / 4, 0.389140625 / 4
    firsts = 0.25 * (firsts[0] - left) + 0.75 * first, 0.25 * (firsts[1] + right) + 0.75 * first
    seconds, rests = (seconds[0] - left, seconds[1] + right), (rests[0] - left, rests[1] + right)
    close(take(4), [firsts, seconds, rests])
    gradient = second - (seconds[0] + seconds[1]) / 2
    momentum = 0.9 * -1.5 + gradient
    second = second - 0.7 * (gradient + 0.9 * momentum)

    # 5: the second weight is applied, with the momentum of its first round.
    left = (firsts[0] + seconds[0] + rests[0] - 4) / 4
    right = (firsts[1] + seconds[1] + rests[1] - 8) / 4
    seconds = 0.25 * (seconds[0] - left) + 0.75 * second, 0.25 * (seconds[1] - right) + 0.75 * second
    rests = rests[0] - left, rests[1] - right
    close(take(5), [[firsts[0] - left, firsts[1] - right], seconds, rests])

    # What is evaluated has one more round of all: of the rests, which are due, and of what the others have since made.
    outer = method.eval_model(state.method)
    for found, theta, own, before in (
        (outer.weights.array[0], first, (firsts[0] - left, firsts[1] - right), -mean),
        (outer.weights.array[1], second, seconds, momentum),
        (outer.rest.array, rest, rests, -1.875),
    ):
        gradient = theta - (own[0] + own[1]) / 2
        close(found, theta - 0.7 * (gradient + 0.9 * (0.9 * before + gradient)))


def test_a_schedule_of_other_layers_is_refused():
    stack = Stack(hax.zeros(Layers), hax.zeros(()))
    with pytest.raises(UserError, match=r"for 5 layers, but .* over 2 .* layers=2\) would fit"):
        Diloco.of(stack, stack_loss, optax.sgd(0.1), OUTER, layout_of_two(), Schedule(3, 3, 1, layers=5))
