"""Generation with a key/value cache: a batch of prompts, a block of tokens at a call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from gregale.axes.layout import BATCH
from gregale.inference.token_sampling import Sampling, draw
from gregale.model.cache import POSITION, Cache
from gregale.model.config import CompilerOptions
from gregale.model.execution import Execution
from gregale.model.llama import Llama

BUCKET = 64  # prompts are filled up to multiples of this at least, so that few lengths are compiled
BLOCK = 32  # most tokens that are drawn before Python is asked again
FIRST_SLOTS = 512  # of the caches, if a text may become as long


class Prompt(NamedTuple):
    """What is continued: token ids, at least one, and the seed of what is drawn after them."""

    tokens: Sequence[int]
    seed: int = 0


class Rows(NamedTuple):
    """What stays the same of a batch while its texts grow, for each row.

    - `first`: the place of its first token, int32 [row]
    - `seeds`: of what is drawn, int32 [row]
    """

    first: np.ndarray
    seeds: np.ndarray


class Last(NamedTuple):
    """The tokens that a block follows.

    - `tokens`: one of each row, int32 [row]
    - `over`: whether a row has ended, bool [row]
    - `place`: where they stand
    """

    tokens: np.ndarray
    over: np.ndarray
    place: int


class Generator:
    """Continues prompts with models of one shape; keeps its compiled programs from one batch and model to the next.

    The rows of a batch know nothing of one another: what is drawn for a row depends on its tokens, its seed, and how
    many tokens it already has. The shapes of a batch, by which sums are rounded, are those of its number of rows and of
    the length to which it is filled up (`width_of`).

    - `execution`: its layout may split the batch, if it divides the rows
    - `vocabulary`: tokens that may be drawn; a model's vocabulary may be padded beyond them
    - `ends`: the tokens that end a text, at least one
    - `options`: the compiler's
    """

    def __init__(
        self, execution: Execution, vocabulary: int, ends: Collection[int], options: CompilerOptions | None = None
    ):
        self._execution, self._vocabulary, self._ends = execution, vocabulary, np.asarray(list(ends), np.int32)
        compiled = partial(jax.jit, compiler_options=options)
        self.read = compiled(self._read_prompts, static_argnames=("slots", "sampling"))
        self.draw = compiled(self._draw_block, static_argnames=("sampling",), donate_argnames=("caches",))
        self._widen = compiled(self._with_room, static_argnames=("slots",))

    def tokens(self, model: Llama, prompt: Prompt, count: int, sampling: Sampling) -> Iterator[int]:
        """Up to `count` tokens that continue one prompt; ends early before a token that ends a text.

        `model`: as `blocks` takes it
        """
        for block in self.blocks(model, [prompt], count, sampling, repeat(BLOCK)):
            for token in block[0].tolist():
                if token in self._ends:
                    return
                yield token

    def blocks(
        self,
        model: Llama,
        prompts: Sequence[Prompt],
        count: int,
        sampling: Sampling,
        sizes: Iterator[int],
        is_over: Callable[[int], bool] = lambda row: False,
    ) -> Iterator[np.ndarray]:
        """Up to `count` tokens that continue each prompt, block by block: integers [row, token].

        The first block has one token a row, and each of the others is drawn by one call of a program. What stands in a
        row after a token that ends a text means nothing. It goes on until all rows have ended.

        Arguments:
        - `model`: as the execution runs it; with its blocks `unstacked` no token copies weights or caches
        - `sampling`: but for its seed; the prompts have theirs
        - `sizes`: how many tokens each block after the first may have, 1 to `BLOCK`; does not change the tokens
        - `is_over`: whether no more is wanted of a row, asked after each block
        """
        ids, rows = filled(prompts)
        sampling = replace(sampling, seed=0)  # a seed of its own makes no program of its own
        known, most = ids.shape[1], ids.shape[1] + count  # tokens that are known, and that are wanted in all
        window = model.config.window_of_all
        slots = slots_for(known, most, window)
        tokens, caches = self.read(model, ids, rows, slots=slots, sampling=sampling)
        drawn, over = np.asarray(tokens)[:, None], np.zeros(len(prompts), bool)
        while True:
            yield drawn
            known += drawn.shape[1]
            over |= np.isin(drawn, self._ends).any(axis=1)
            over |= [is_over(row) for row in range(len(prompts))]
            if known == most or over.all():
                return
            if slots_for(known, most, window) > slots:
                slots = slots_for(known, most, window)
                caches = self._widen(caches, slots=slots)
            wanted = min(next(sizes), most - known)
            if window is None or slots < window:
                wanted = min(wanted, slots + 1 - known)
            last = Last(drawn[:, -1], over, known - 1)
            block, caches = self.draw(model, rows, last, caches, wanted, sampling=sampling)
            drawn = np.asarray(block)[:, :wanted]

    def _read_prompts(self, model, ids, rows: Rows, slots: int, sampling: Sampling):
        """The tokens [row] after prompts `ids` [row, position], and the caches."""
        tokens = self._execution.placed(hax.named(ids, (BATCH, POSITION)))
        logits, caches = model.prefill(tokens, hax.named(rows.first, (BATCH,)), slots, self._execution)
        return self._everywhere(self._drawn(logits, ids.shape[1] - 1, rows, sampling)), caches

    def _draw_block(self, model, rows: Rows, last: Last, caches, wanted, sampling: Sampling):
        """The `wanted` tokens after the last ones, [row, BLOCK], and the caches; fewer if all rows are over."""
        run, first, ends = self._execution, hax.named(rows.first, (BATCH,)), jnp.asarray(self._ends)

        def goes_on(state):
            drawn, _, over, _, _ = state
            return (drawn < wanted) & ~over.all()

        def one(state):
            drawn, tokens, over, block, caches = state
            place, known = last.place + drawn, run.placed(hax.named(tokens[:, None], (BATCH, POSITION)))
            logits, caches = model.decode(known, caches, place, first, run)
            tokens = jnp.where(over, ends[0], self._drawn(logits, place, rows, sampling))
            over = over | (tokens[:, None] == ends).any(axis=1)
            return drawn + 1, tokens, over, block.at[:, drawn].set(tokens), caches

        block = jnp.full((len(last.tokens), BLOCK), ends[0])
        *_, block, caches = jax.lax.while_loop(goes_on, one, (jnp.int32(0), last.tokens, last.over, block, caches))
        return self._everywhere(block), caches

    def _with_room(self, caches, slots: int):
        def widened(cache: Cache) -> Cache:
            return cache.with_room(slots, self._execution)

        return jax.tree.map(widened, caches, is_leaf=lambda leaf: isinstance(leaf, Cache))

    def _drawn(self, logits: NamedArray, place, rows: Rows, sampling: Sampling) -> jax.Array:
        """The tokens [row] that follow those at a place; a row's seed and its position there give the randomness.

        A device draws for its own rows: the partitioner would bring all rows together to sort one.
        """

        def one(logits, seed, position):
            key = jax.random.fold_in(jax.random.key(seed), position)
            return draw(logits[: self._vocabulary], sampling, key).astype(jnp.int32)

        layout = self._execution.layout
        each, all_of_a_row = (layout.spec(axes, layout.compute) for axes in ((BATCH,), (BATCH, "token")))
        drawn = jax.shard_map(
            jax.vmap(one), mesh=layout.mesh, in_specs=(all_of_a_row, each, each), out_specs=each, check_vma=False
        )
        return drawn(logits.rearrange((BATCH, "vocab")).array, rows.seeds, place - rows.first)

    def _everywhere(self, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, self._execution.layout.sharding((), {}))


def filled(prompts: Sequence[Prompt]) -> tuple[np.ndarray, Rows]:
    """Token ids [row, place], filled up on the left, and what else the rows are."""
    width = max(width_of(len(prompt.tokens)) for prompt in prompts)
    ids = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.tokens) :] = prompt.tokens
    first, seeds = [width - len(prompt.tokens) for prompt in prompts], [prompt.seed for prompt in prompts]
    return ids, Rows(np.asarray(first, np.int32), np.asarray(seeds, np.int32))


def width_of(tokens: int) -> int:
    """The length to which a prompt of so many tokens is filled up: by less than `BUCKET`, or by less than a quarter.

    So there are four lengths for each doubling, and a program for each.
    """
    return multiple_of(max(BUCKET, 1 << max(tokens.bit_length() - 3, 0)), tokens)


def slots_for(tokens: int, most: int, window: int | None) -> int:
    """Slots of the caches when so many tokens are known: a power of two, so that few sizes are compiled, or `most`.

    Attention goes over all slots: twice as many as there are tokens at most, or `FIRST_SLOTS`; and no more than a
    sliding window is wide, since a slot is written again when its token has left the window.
    """
    slots = min(multiple_of(BUCKET, most), max(FIRST_SLOTS, 1 << tokens.bit_length()))
    return slots if window is None else min(slots, multiple_of(BUCKET, window))


def multiple_of(bucket: int, size: int) -> int:
    return -(-size // bucket) * bucket
