"""Generation with a key/value cache, a block of tokens at a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from gregale.axes.layout import BATCH
from gregale.model.cache import POSITION, Cache
from gregale.model.config import CompilerOptions
from gregale.model.execution import Execution
from gregale.model.llama import Llama
from gregale.settings import Range, Settings, at_least, whole

BUCKET = 64  # prompts are filled up to multiples of this, so that few lengths are compiled
BLOCK = 32  # most tokens that are drawn before Python is asked again
FIRST_SLOTS = 512  # of the caches, if a text may become as long


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
    """Continues prompts with models of one shape; keeps its compiled programs from one prompt and model to the next.

    - `execution`: of a layout that does not split the batch
    - `vocabulary`: tokens that may be drawn; a model's vocabulary may be padded beyond them
    - `end`: the token that ends a text
    - `options`: the compiler's
    """

    def __init__(self, execution: Execution, vocabulary: int, end: int, options: CompilerOptions | None = None):
        self._execution, self._vocabulary, self._end = execution, vocabulary, end
        compiled = partial(jax.jit, compiler_options=options)
        self.read = compiled(self._read_prompt, static_argnames=("slots", "sampling"))
        self.draw = compiled(self._draw_block, static_argnames=("sampling",), donate_argnames=("caches",))
        self._widen = compiled(_with_room, static_argnames=("slots",))

    def tokens(self, model: Llama, prompt: Sequence[int], count: int, sampling: Sampling) -> Iterator[int]:
        """Up to `count` tokens that continue the prompt; ends early before the end-of-document token.

        Arguments:
        - `model`: as the execution runs it; with its blocks `unstacked` no token copies weights or caches
        - `prompt`: token ids, at least one
        """
        return chain.from_iterable(self.blocks(model, prompt, count, sampling, repeat(BLOCK)))

    def blocks(
        self, model: Llama, prompt: Sequence[int], count: int, sampling: Sampling, sizes: Iterator[int]
    ) -> Iterator[list[int]]:
        """The same in lists, each drawn by one call of a program.

        Arguments:
        - `sizes`: how many tokens each list after the first may have, 1 to `BLOCK`; does not change the tokens
        """
        known, most = len(prompt), len(prompt) + count  # tokens that are known, and that are wanted in all
        ids = np.zeros((1, multiple_of(BUCKET, known)), np.int32)
        ids[0, :known] = prompt
        seed, sampling = sampling.seed, replace(sampling, seed=0)  # a seed of its own makes no program of its own
        slots = slots_for(known, most)
        token, caches = self.read(model, ids, known - 1, seed, slots=slots, sampling=sampling)
        drawn = [int(token)]
        while True:
            if self._end in drawn:
                drawn = drawn[: drawn.index(self._end)]
                most = known + len(drawn)
            yield drawn
            known += len(drawn)
            if known == most:
                return
            if known > slots:
                slots = slots_for(known, most)
                caches = self._widen(caches, slots=slots)
            wanted = min(next(sizes), most - known, slots + 1 - known)
            block, caches = self.draw(model, drawn[-1], caches, known - 1, wanted, seed, sampling=sampling)
            drawn = np.asarray(block)[:wanted].tolist()

    def _read_prompt(self, model, ids, last, seed, slots: int, sampling: Sampling):
        """The token after a prompt whose last token is at place `last` of `ids` [1, position], and the caches."""
        tokens = hax.named(ids, (BATCH, POSITION))
        logits, caches = model.prefill(tokens, last, slots, self._execution)
        return self._drawn(logits, last, seed, sampling), caches

    def _draw_block(self, model, token, caches, place, wanted, seed, sampling: Sampling):
        """The `wanted` tokens after that at a place, [BLOCK], and the caches; nothing is drawn after the end."""

        def goes_on(state):
            drawn, token, _, _ = state
            return (drawn < wanted) & (token != self._end)

        def one(state):
            drawn, token, block, caches = state
            logits, caches = model.decode(hax.named(token[None, None], (BATCH, POSITION)), caches, at(drawn), run)
            token = self._drawn(logits, at(drawn), seed, sampling)
            return drawn + 1, token, block.at[drawn].set(token), caches

        def at(drawn):
            return place + drawn

        run, block = self._execution, jnp.full(BLOCK, self._end, jnp.int32)
        state = (jnp.int32(0), jnp.asarray(token, jnp.int32), block, caches)
        _, _, block, caches = jax.lax.while_loop(goes_on, one, state)
        return self._everywhere(block), caches

    def _drawn(self, logits: NamedArray, place, seed, sampling: Sampling) -> jax.Array:
        """The token that follows the one at a place; its randomness is that of the seed and the place."""
        key = jax.random.fold_in(jax.random.key(seed), place)
        return self._everywhere(draw(logits.array[0, : self._vocabulary], sampling, key).astype(jnp.int32))

    def _everywhere(self, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, self._execution.layout.sharding((), {}))


def slots_for(tokens: int, most: int) -> int:
    """Slots of the caches when so many tokens are known: a power of two, so that few sizes are compiled, or `most`.

    Attention goes over all slots: twice as many as there are tokens at most, or `FIRST_SLOTS`.
    """
    return min(multiple_of(BUCKET, most), max(FIRST_SLOTS, 1 << tokens.bit_length()))


def multiple_of(bucket: int, size: int) -> int:
    return -(-size // bucket) * bucket


def _with_room(caches, slots: int):
    return jax.tree.map(lambda cache: cache.with_room(slots), caches, is_leaf=lambda leaf: isinstance(leaf, Cache))
