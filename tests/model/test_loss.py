"""The blocked loss against a plain softmax, and the shapes that its compiled program holds."""

import math

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.axes.layout import BATCH
from gregale.cost.hlo import parse
from gregale.model.execution import Execution
from gregale.model.loss import losses_of_head, next_token_loss
from gregale.model.losses import Logits
from tests.mesh.support import assert_trees_close, layout_of, one_device, placed

Rows, Position, Embed, Vocab = Axis(BATCH, 8), Axis("position", 7), Axis("embed", 16), Axis("vocab", 24)
TOKENS = Rows.size * Position.size
SCALE = 0.37  # the caller divides by the weights; any factor has to reach the gradients


def inputs(weights: str = "uneven"):
    generator = np.random.default_rng(0)
    random = generator.random((Rows.size, Position.size), dtype=np.float32)
    chosen = {"uneven": random * (random > 0.4), "zeros": np.zeros_like(random)}
    return (
        hax.named(generator.standard_normal((8, 7, 16), dtype=np.float32), (Rows, Position, Embed)),
        hax.named(generator.standard_normal((16, 24), dtype=np.float32) * 3, (Embed, Vocab)),
        hax.named(generator.integers(0, Vocab.size, (8, 7)), (Rows, Position)),
        hax.named(chosen[weights], (Rows, Position)),
    )


def plain(hidden, head, targets, weights):
    log_probabilities = jax.nn.log_softmax(hidden.array @ head.array, axis=-1)
    at_target = jnp.take_along_axis(log_probabilities, targets.array[..., None], axis=-1)[..., 0]
    return -jnp.sum(weights.array * at_target) * SCALE


def blocked(run: Execution):
    return lambda *arguments: next_token_loss(*arguments, run) * SCALE


def both(loss, arguments):
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*arguments)


@pytest.mark.parametrize(
    ("block", "weights", "fused"),
    [
        (1, "uneven", False),
        (5, "uneven", False),
        (1000, "uneven", False),
        (5, "zeros", False),
        (5, "uneven", True),
        (1000, "uneven", True),
    ],
)
def test_blocks_give_the_plain_loss(block, weights, fused):
    arguments = inputs(weights)
    loss, gradients = both(blocked(one_device(loss_block=block, fused_logits=fused)), arguments)
    expected, expected_gradients = both(plain, arguments)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    assert_trees_close(gradients, expected_gradients, atol=1e-5, rtol=1e-5)
    assert jax.jit(blocked(one_device(loss_block=block)))(*arguments) == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize(("data", "model", "fused"), [(8, 1, False), (8, 1, True), (2, 4, False)])
def test_devices_give_the_plain_loss(data, model, fused):
    layout = layout_of(1, data, model)
    arguments = inputs()
    run = Execution(layout=layout.inside_replica(), loss_block=5, fused_logits=fused)
    loss, gradients = both(blocked(run), placed(arguments, layout, layout.compute))
    expected, expected_gradients = both(plain, arguments)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert_trees_close(gradients, expected_gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("devices", "fused"), [(8, False), (1, True)])
def test_capped_logits_and_rows_without_any(devices, fused):
    """As `model.logit_softcap` and `model.row_multiple` have it: 20 of 24 rows are tokens."""
    hidden, head, targets, weights = inputs()
    arguments = (hidden, head, targets % 20, weights)
    layout = layout_of(1, 1, devices)
    run = Execution(layout=layout.inside_replica(), loss_block=5, fused_logits=fused)

    def ours(*arguments):
        return next_token_loss(*arguments, run, Logits(cap=2.0, rows=20)) * SCALE

    def expected(hidden, head, targets, weights):
        logits = 2.0 * jnp.tanh(hidden.array @ head.array / 2.0)[..., :20]
        at_target = jnp.take_along_axis(jax.nn.log_softmax(logits), targets.array[..., None], axis=-1)[..., 0]
        return -jnp.sum(weights.array * at_target) * SCALE

    loss, gradients = both(ours, placed(arguments, layout, layout.compute))
    wanted, wanted_gradients = both(expected, arguments)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert_trees_close(gradients, wanted_gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("data", "model", "fused"), [(1, 1, False), (2, 4, False), (8, 1, True)])
def test_z_loss_is_the_weighted_square_of_the_logarithm_of_the_sum(data, model, fused):
    layout = layout_of(1, data, model)
    run = Execution(layout=layout.inside_replica(), loss_block=5, fused_logits=fused)
    hidden, head, targets, weights = inputs()
    arguments = (hidden, head, targets % 20, weights)

    def ours(*arguments):
        loss, z_loss = losses_of_head(*arguments, run, Logits(cap=9.0, rows=20, z_loss=0.3))
        return (loss + z_loss) * SCALE, z_loss

    def expected(hidden, head, targets, weights):
        logits = 9.0 * jnp.tanh(hidden.array @ head.array / 9.0)[..., :20]
        at_target = jnp.take_along_axis(logits, targets.array[..., None], axis=-1)[..., 0]
        log_z = jax.nn.logsumexp(logits, -1)
        z_loss = 0.3 * jnp.sum(weights.array * log_z**2)
        return (jnp.sum(weights.array * (log_z - at_target)) + z_loss) * SCALE, z_loss

    def both(loss, arguments):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*arguments)

    found, gradients = both(ours, placed(arguments, layout, layout.compute))
    wanted, wanted_gradients = both(expected, arguments)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert_trees_close(gradients, wanted_gradients, atol=1e-5, rtol=1e-5)
    unneeded = jax.jit(ours)(*placed(arguments, layout, layout.compute))
    np.testing.assert_allclose(unneeded, wanted, rtol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_large_logits_do_not_overflow(fused):
    """Fused, the exponentials of the first shift overflow, and those of the largest logit replace them."""
    hidden, head, targets, weights = inputs()
    arguments = (hidden * 1000.0, head, targets, weights)
    loss, gradients = both(blocked(one_device(loss_block=16, fused_logits=fused)), arguments)
    expected, expected_gradients = both(plain, arguments)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert_trees_close(gradients, expected_gradients, atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_bfloat16_inputs_are_close(fused):
    hidden, head, targets, weights = inputs()
    low = (hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16), targets, weights)
    loss, gradients = both(blocked(one_device(loss_block=16, fused_logits=fused)), low)
    expected, expected_gradients = both(plain, (hidden, head, targets, weights))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected, rtol=0.01)
    for gradient, exact in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(gradient.array, np.float32) - exact.array)
        assert error < 0.02 * np.linalg.norm(exact.array)


def largest_array(block: int) -> int:
    """Elements of the largest array in the compiled loss and gradient; tokens x vocabulary are the most by far."""
    arguments = inputs()
    gradient = jax.jit(jax.value_and_grad(blocked(one_device(loss_block=block)), argnums=(0, 1)))
    module = parse(gradient.lower(*arguments).compile().as_text())
    return max(
        math.prod(shape.sizes)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        for shape in instruction.shapes
    )


def test_full_logits_are_never_held():
    assert largest_array(block=5) < TOKENS * Vocab.size <= largest_array(block=TOKENS), "they would be found"
