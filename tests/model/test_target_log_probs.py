"""Log-likelihoods of targets against a plain softmax, with columns that are no tokens, equal logits, and meshes."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.axes.layout import BATCH
from gregale.model.execution import Execution
from gregale.model.loss import target_scores
from tests.mesh.support import layout_of, one_device, placed
from tests.model import oracle
from tests.model.test_llama import BATCH_OF_TOKENS, CONFIGS, VOCABULARY, made

Rows, Position, Embed, Vocab = Axis(BATCH, 8), Axis("position", 7), Axis("embed", 16), Axis("vocab", 24)
TOKENS = 19  # the other columns fill the head up


def inputs():
    """Columns 3 and 11 of the head are equal, and the likeliest of some tokens; the columns that fill up are larger."""
    generator = np.random.default_rng(0)
    hidden = generator.standard_normal((8, 7, 16), dtype=np.float32)
    head = generator.standard_normal((16, 24), dtype=np.float32)
    head[:, 11] = head[:, 3]
    head[:, TOKENS:] *= 9
    hidden[0] = 5 * head[:, 3]
    targets = generator.integers(0, TOKENS, (8, 7))
    targets[0] = [3, 11, 3, 11, 3, 11, 3]
    targets[1:3] = np.argmax(hidden @ head[:, :TOKENS], -1)[1:3]
    arrays = (hidden, (Rows, Position, Embed)), (head, (Embed, Vocab)), (targets, (Rows, Position))
    return tuple(hax.named(array, axes) for array, axes in arrays)


def plain():
    hidden, head, targets = (np.asarray(each.array) for each in inputs())
    logits = (hidden.astype(np.float64) @ head)[..., :TOKENS]
    top = logits.max(-1, keepdims=True)
    scores = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.take_along_axis(scores, targets[..., None], -1)[..., 0], np.argmax(logits, -1) == targets


@pytest.mark.parametrize(("data", "model", "block"), [(1, 1, 5), (1, 1, 1000), (2, 4, 3)])
def test_it_is_the_plain_softmax_over_the_tokens(data, model, block):
    layout = layout_of(1, data, model)
    run = Execution(layout=layout.inside_replica(), loss_block=block)
    hidden, head, targets = placed(inputs(), layout, layout.compute)
    score = jax.jit(lambda hidden, head, targets: target_scores(hidden, head, targets, TOKENS, run))
    scores, likeliest = score(hidden, head, targets)
    expected, greedy = plain()
    np.testing.assert_allclose(scores.array, expected, rtol=1e-5, atol=2e-5)
    assert scores.array.dtype == jnp.float32
    np.testing.assert_array_equal(likeliest.array, greedy)
    assert likeliest.array[0].tolist() == [True, False] * 3 + [True], "of equal ones the first is the likeliest"
    assert greedy[1:3].all()


def test_gradients_hold_the_logits_of_a_block_alone():
    tokens, embed, vocab = (Axis(BATCH, 8), Axis("position", 256)), Axis("embed", 16), Axis("vocab", 8192)
    run = Execution(layout=layout_of().inside_replica(), loss_block=64)

    def total(hidden, head, targets):
        return jnp.sum(target_scores(hidden, head, targets, None, run)[0].array)

    shapes = hax.zeros((*tokens, embed)), hax.zeros((embed, vocab)), hax.zeros(tokens, dtype=jnp.int32)
    memory = jax.jit(jax.grad(jax.checkpoint(total))).lower(*shapes).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 8 * 256 * 8192 * 4 / 8


@pytest.mark.parametrize("name", ["llama3", list(CONFIGS)[-1]])
def test_the_scores_of_a_model_are_its_losses(name):
    """Whatever a model does with its logits has to be in both: the plainest one, and the one that came last."""
    model, run = made(name), one_device(loss_block=5)
    scores, _ = jax.jit(lambda batch: model.scores(batch, VOCABULARY, run))(BATCH_OF_TOKENS)
    losses = jax.jit(lambda batch: oracle.losses(oracle.plain_weights(model), batch, model.config))(
        oracle.plain_batch(BATCH_OF_TOKENS)
    )
    np.testing.assert_allclose(-scores.array, losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("data", "model", "block", "fused"), [(1, 1, 5, False), (1, 1, 1000, True), (2, 4, 3, False), (4, 1, 3, True)]
)
def test_gradients_are_those_of_the_plain_softmax(data, model, block, fused):
    """Cotangents have both signs; the limit of the logits is part of the derivative."""
    layout, cap = layout_of(1, data, model), 4.0
    run = Execution(layout=layout.inside_replica(), loss_block=block, fused_logits=fused)
    weights = np.random.default_rng(1).standard_normal((8, 7), dtype=np.float32)
    hidden, head, targets = placed(inputs(), layout, layout.compute)

    def weighted(hidden, head):
        return jnp.sum(weights * target_scores(hidden, head, targets, TOKENS, run, cap)[0].array)

    def plain(hidden, head):
        logs = jax.nn.log_softmax(cap * jnp.tanh(hidden @ head[:, :TOKENS] / cap))
        return jnp.sum(weights * jnp.take_along_axis(logs, inputs()[2].array[..., None], -1)[..., 0])

    found = jax.jit(jax.grad(weighted, (0, 1)))(hidden, head)
    expected = jax.jit(jax.grad(plain, (0, 1)))(*(each.array for each in inputs()[:2]))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.array, other, atol=1e-5 * np.abs(other).max())
