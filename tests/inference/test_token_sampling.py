"""What is drawn, beside the probabilities by hand and those that transformers' warpers leave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gregale.inference.generate import Sampling, allowed, draw

LOGITS = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (Sampling(1.0, top_k=3, top_p=0.6), [0.625, 0.375, 0, 0]),
        (Sampling(0), [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_probability(sampling, expected):
    keys = jax.random.split(jax.random.key(0), 20_000)
    tokens = jax.jit(jax.vmap(lambda key: draw(LOGITS, sampling, key)))(keys)
    found = np.bincount(np.asarray(tokens), minlength=4) / len(keys)
    np.testing.assert_allclose(found, expected, atol=0.012)
    assert (found[np.asarray(expected) == 0] == 0).all()


@pytest.mark.parametrize(
    "sampling",
    [
        *(Sampling(temperature) for temperature in (0.3, 1.0, 2.5)),
        *(Sampling(0.7, top_k=k) for k in (1, 5, 300)),
        *(Sampling(1.4, top_p=p) for p in (1e-6, 0.3, 0.95, 1.0)),
        *(Sampling(temperature, top_k=12, top_p=0.8) for temperature in (0.5, 1.0, 2.0)),
    ],
    ids=str,
)
def test_probabilities_are_those_of_transformers(sampling):
    """The processors that `generate` makes of these settings, in its order."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits = 3 * np.random.default_rng(0).standard_normal((4, 200)).astype(np.float32)
    logits[1, 7] = logits[1, 9] = logits[1].max() + 1  # two that are the likeliest
    processors = [transformers.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k is not None:
        processors.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(sampling.top_p))
    theirs = transformers.LogitsProcessorList(processors)(torch.zeros((4, 1), dtype=torch.long), torch.tensor(logits))
    ours = jax.jit(jax.vmap(lambda row: jax.nn.softmax(allowed(row, sampling))))(logits)
    expected = theirs.softmax(dim=-1).numpy()
    if sampling.top_p == 1e-6:  # of two likeliest tokens one is left, and which one says nothing
        ours, expected = np.sort(ours), np.sort(expected)
    np.testing.assert_allclose(ours, expected, atol=1e-6)


def test_all_of_the_probability_is_all_of_the_tokens():
    logits = jnp.asarray([100.0, 0.0, -20.0])  # the first rounds to 1 by itself
    np.testing.assert_array_equal(allowed(logits, Sampling(1.0, top_p=1.0)), logits)
