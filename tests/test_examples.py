"""The examples of docs/examples against plain rewrites; `tests/methods/test_gossip.py` has the method."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from gregale.objectives import Passes
from gregale.optim import ConstantSchedule
from tests.mesh.support import assert_trees_close, one_device, small_model, token_batch
from tests.plugins import EXAMPLES, plugins_from

LENGTH, VOCABULARY = 12, 32


def mixer_and_batch():
    with plugins_from(EXAMPLES):
        from causal_mixer import MixerConfig  # type: ignore[import-not-found]
    random = np.random.default_rng(0)
    tokens, targets = random.integers(0, VOCABULARY, (2, 2, LENGTH))
    values = {"tokens": tokens, "targets": targets, "loss_mask": np.ones((2, LENGTH), np.float32)}
    # The second row has two documents.
    values["positions"] = np.stack([np.arange(LENGTH), [*range(5), *range(LENGTH - 5)]])
    batch = {name: hax.named(jnp.asarray(value), ("batch", "position")) for name, value in values.items()}
    return MixerConfig(hidden=8, reach=3).init(Axis("vocab", VOCABULARY), jax.random.key(0)), batch


def test_the_mixer_sees_earlier_tokens_of_a_document_alone():
    model, batch = mixer_and_batch()
    logits = jax.jit(lambda tokens: model.logits({**batch, "tokens": tokens}, one_device()).array)
    tokens = batch["tokens"].array
    for place in (3, 4, 6):
        changed = hax.named(tokens.at[:, place].set((tokens[:, place] + 1) % VOCABULARY), ("batch", "position"))
        differs = np.any(np.asarray(logits(changed) != logits(batch["tokens"])), axis=-1)
        reached = [place, *range(place + 1, place + 5)]  # two layers, each two tokens back
        assert np.flatnonzero(differs[0]).tolist() == reached
        assert np.flatnonzero(differs[1]).tolist() == [each for each in reached if (each < 5) == (place < 5)]


def test_the_mixers_loss_is_that_of_its_logits():
    model, batch = mixer_and_batch()
    loss, weight = jax.jit(lambda model: model.loss(batch, one_device()))(model)
    scores = jax.jit(lambda model: jax.nn.log_softmax(model.logits(batch, one_device()).array))(model)
    expected = -np.take_along_axis(np.asarray(scores), np.asarray(batch["targets"].array)[..., None], axis=-1).sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert weight == 2 * LENGTH


def test_adan_is_the_algorithm_as_it_is_written_down():
    with plugins_from(EXAMPLES):
        from adan import AdanConfig  # type: ignore[import-not-found]
    config = AdanConfig(learning_rate=0.1, weight_decay=0.0, clip_norm=None, schedule=ConstantSchedule())
    transformation = config.build({"a": jnp.zeros(3)}, steps=5).whole()
    gradients = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    state, m, v, n, before = transformation.init({"a": jnp.zeros(3)}), 0.0, 0.0, 0.0, gradients[0]
    update_of = jax.jit(transformation.update)
    for k, g in enumerate(gradients.astype(float), 1):
        update, state = update_of({"a": g.astype(np.float32)}, state, {"a": np.zeros(3, np.float32)})
        change, before = g - before, g
        m, v, n = 0.98 * m + 0.02 * g, 0.92 * v + 0.08 * change, 0.99 * n + 0.01 * (g + 0.92 * change) ** 2
        direction = (m / (1 - 0.98**k) + 0.92 * v / (1 - 0.92**k)) / (np.sqrt(n / (1 - 0.99**k)) + 1e-8)
        np.testing.assert_allclose(update["a"], -0.1 * direction, rtol=2e-5)


def test_orpo_is_the_paper_s_loss_of_pairs():
    with plugins_from(EXAMPLES):
        from orpo import OrpoConfig  # type: ignore[import-not-found]
    model, batch, run = small_model(), token_batch(6, uneven=False), one_device()
    mask = np.array(batch["loss_mask"].array)
    mask[:, :3], mask[5] = 0, 0  # the last pair has an answer without tokens
    batch["loss_mask"] = hax.named(mask, ("batch", "position"))

    def own(model):
        return OrpoConfig(strength=0.5).loss(Passes(model, batch, run))

    def plain(model):
        logs = jax.nn.log_softmax(model.logits(batch, run).array)
        at_target = jnp.take_along_axis(logs, batch["targets"].array[..., None], -1)[..., 0]
        mean = jnp.stack([jnp.sum(at_target[row] * mask[row]) / mask[row].sum() for row in range(4)])
        odds = jnp.exp(mean) / (1 - jnp.exp(mean))
        ratios = jnp.log(odds[::2] / odds[1::2])
        return jnp.sum(-mean[::2] - 0.5 * jnp.log(1 / (1 + jnp.exp(-ratios)))), jnp.sum(ratios)

    found = jax.jit(own)(model)
    np.testing.assert_allclose((found.loss, found.metrics["log_odds_ratio"]), jax.jit(plain)(model), rtol=1e-5)
    assert found.weight == 2
    gradients = (jax.jit(jax.grad(loss))(model) for loss in (lambda each: own(each).loss, lambda each: plain(each)[0]))
    assert_trees_close(*gradients, atol=1e-6, rtol=1e-4)
