"""Generation, a token at a time, with a key/value cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from gregale.axes.layout import BATCH
from gregale.model.attention import POSITION, Cache
from gregale.model.execution import Execution
from gregale.model.llama import Llama
from gregale.settings import Range, Settings, at_least, whole

BUCKET = 64  # prompts are filled up to multiples of this, so that few lengths are compiled


@dataclass(frozen=True)
class Sampling(Settings):
    """How the next token is drawn from the model's probabilities."""

    temperature: float = field(
        default=0.8, metadata={"help": "randomness; 0 takes the likeliest token", "range": at_least(0)}
    )
    top_k: int | None = field(
        default=None, metadata={"help": "draw from this many likeliest tokens only; null: all", "range": whole(1)}
    )
    top_p: float | None = field(
        default=None,
        metadata={
            "help": "draw from the likeliest tokens of this total probability; null: all",
            "range": Range(0, 1, above=True),
        },
    )
    seed: int = field(default=0, metadata={"help": "of the draws", "range": whole(0)})


def draw(logits: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """One token: softmax(logits / temperature), cut to the `top_k` likeliest and then to the nucleus of `top_p`.

    The nucleus is the smallest set of likeliest tokens whose probabilities add up to at least `top_p` (Holtzman et
    al., arXiv 1904.09751).

    Arguments:
    - `logits`: [vocab], float32
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.size))[0][-1]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p is not None:
        order = jnp.argsort(-logits)
        probabilities = jax.nn.softmax(logits[order])
        before = jnp.cumsum(probabilities) - probabilities
        logits = logits.at[order].set(jnp.where(before < sampling.top_p, logits[order], -jnp.inf))
    return jax.random.categorical(key, logits)


class Generator:
    """Continues prompts with one model; keeps its compiled programs from one prompt to the next.

    - `execution`: of a layout that does not split the batch
    - `vocabulary`: tokens that may be drawn; the model's vocabulary may be padded beyond them
    - `end`: the token that ends a text
    """

    def __init__(self, model: Llama, execution: Execution, vocabulary: int, end: int):
        self._model, self._execution = model, execution
        self._vocabulary, self._end = vocabulary, end
        self._begin = jax.jit(self._begin_and_draw, static_argnames=("slots", "sampling"))
        self._go_on = jax.jit(self._decode_and_draw, static_argnames=("sampling",), donate_argnames=("cache",))

    def tokens(self, prompt: Sequence[int], count: int, sampling: Sampling) -> Iterator[int]:
        """Up to `count` tokens that continue the prompt; ends early before the end-of-document token.

        Arguments:
        - `prompt`: token ids, at least one
        """
        length = len(prompt)
        filled = -(-length // BUCKET) * BUCKET
        slots = -(-(filled + count) // BUCKET) * BUCKET
        ids = np.zeros(filled, np.int32)
        ids[:length] = prompt
        token, cache = self._begin(self._model, ids, length - 1, sampling.seed, slots=slots, sampling=sampling)
        for place in range(length, length + count):
            if int(token) == self._end:
                return
            yield int(token)
            if place + 1 < length + count:
                ids = np.asarray(token)[None]
                token, cache = self._go_on(self._model, ids, cache, place, 0, sampling.seed, sampling=sampling)

    def _begin_and_draw(self, model, ids, last, seed, slots: int, sampling: Sampling):
        cache = Cache.empty(model.config, Axis(BATCH, 1), slots, self._execution.dtype)
        return self._decode_and_draw(model, ids, cache, 0, last, seed, sampling)

    def _decode_and_draw(self, model, ids, cache, start, last, seed, sampling: Sampling):
        tokens = hax.named(jnp.asarray(ids, jnp.int32)[None], (Axis(BATCH, 1), Axis(POSITION, ids.shape[0])))
        logits, cache = model.decode(tokens, cache, start, last, self._execution)
        key = jax.random.fold_in(jax.random.key(seed), start + last)
        token = draw(logits.array[0, : self._vocabulary], sampling, key).astype(jnp.int32)
        return jax.lax.with_sharding_constraint(token, self._execution.layout.sharding((), {})), cache
