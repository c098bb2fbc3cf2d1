"""Draw the next token from a model's logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gregale.settings import Range, Settings, at_least, setting, whole


@dataclass(frozen=True)
class Sampling(Settings):
    temperature: float = setting(0.8, "randomness; 0 takes the likeliest token", range=at_least(0))
    top_k: int | None = setting(None, "draw from this many likeliest tokens only; null: all", range=whole(1))
    top_p: float | None = setting(
        None, "draw from the likeliest tokens of this total probability; null: all", range=Range(0, 1, above=True)
    )
    seed: int = setting(0, "of the draws", range=whole(0))


def draw(logits: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """Draw one token of those that `allowed` leaves, by their probabilities; at temperature 0 the likeliest one.

    - `logits`: [vocab], float32
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits)
    return jax.random.categorical(key, allowed(logits, sampling))


def allowed(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Return logits / temperature, restricted to the `top_k` likeliest and then to the nucleus of `top_p`; others are
    -inf.

    The nucleus is the smallest set of likeliest tokens whose probabilities, among those that `top_k` leaves, add up to
    at least `top_p` (Holtzman et al., arXiv 1904.09751). This is the order of transformers' warpers.

    - `logits`: [vocab], float32
    - `sampling`: with a temperature above 0
    """
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.size))[0][-1]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p is not None and sampling.top_p < 1:
        order = jnp.argsort(-logits)
        probabilities = jax.nn.softmax(logits[order])
        before = jnp.cumsum(probabilities) - probabilities
        logits = logits.at[order].set(jnp.where(before < sampling.top_p, logits[order], -jnp.inf))
    return logits
