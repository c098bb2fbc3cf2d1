"""Models that have logits alone give the tokens and the scores of those with a cache."""

from itertools import cycle

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from gregale.inference import generate
from gregale.inference.generate import BLOCK, Generator, Prompt, UncachedDecoder, scores
from gregale.model.llama import Llama
from tests.inference.test_generate import DRAWN, NO_END, PROMPT
from tests.mesh.support import one_device
from tests.model.test_llama import VOCABULARY, made


class Alone(eqx.Module):
    """The logits of another model."""

    other: Llama

    def logits(self, batch, execution):
        return self.other.logits(batch, execution)


def test_prompts_of_several_lengths_are_continued_as_with_a_cache(monkeypatch):
    monkeypatch.setattr(generate, "FIRST_SLOTS", 8)  # so that the tokens outgrow their first slots
    generator, model = Generator(one_device(weights_ready=True), VOCABULARY, [NO_END]), made("qwen3")
    prompts = [Prompt(PROMPT, 3), Prompt([7, 2], 4)]

    def tokens(model) -> np.ndarray:
        return np.concatenate(list(generator.blocks(model, prompts, 70, DRAWN, cycle([BLOCK]))), axis=1)

    np.testing.assert_array_equal(tokens(UncachedDecoder(Alone(model)).unstacked()), tokens(model.unstacked()))


def test_targets_are_scored_as_by_a_model_that_scores():
    run, model, random = one_device(), made("llama3"), np.random.default_rng(0)
    tokens, targets = (hax.named(random.integers(0, 30, (2, 9)), ("batch", "position")) for _ in range(2))
    places = hax.named(jnp.broadcast_to(jnp.arange(9), (2, 9)), ("batch", "position"))
    batch = {"tokens": tokens, "targets": targets, "positions": places}
    found, expected = (jax.jit(lambda model: scores(model, batch, 30, run))(each) for each in (Alone(model), model))
    np.testing.assert_allclose(found[0].array, expected[0].array, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[1].array, expected[1].array)
