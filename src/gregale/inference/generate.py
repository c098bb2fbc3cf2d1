"""Generation with a key/value cache: the logits of the next token, and its draw."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH
from gregale.errors import UserError
from gregale.model.cache import POSITION, for_tokens
from gregale.model.config import Batch, CompilerOptions, ModelMethods
from gregale.model.execution import Execution
from gregale.settings import Range, Settings, at_least, setting, whole


class KnownTokens(eqx.Module):
    """All tokens of a batch so far, in the place of a cache: integers [row, slot], row by row from slot 0."""

    tokens: jax.Array

    def with_room(self, slots: int, execution: Execution) -> "KnownTokens":
        """Return the same with more slots."""
        del execution
        return KnownTokens(jnp.pad(self.tokens, ((0, 0), (0, slots - self.tokens.shape[1]))))


class UncachedDecoder(eqx.Module):
    """A model with `logits` only, as the generator needs it: each token computes all tokens before it again.

    Tokens after the last known one are zeros, which a causal model does not see.

    - `model`: `logits(batch, execution)` returns [batch, position, vocab], of `tokens` and `positions`
    """

    model: Any

    def unstacked(self) -> "UncachedDecoder":
        return self

    def prefill(
        self, tokens: NamedArray, first: NamedArray, slots: int, execution: Execution
    ) -> tuple[NamedArray, KnownTokens]:
        """Return the logits after prompts that are padded on the left, and the tokens; as `Llama.prefill`."""
        width = tokens.array.shape[1]
        known = KnownTokens(jax.vmap(jnp.roll)(tokens.array, -first.array)).with_room(max(slots, width), execution)
        return self._after(known, width - 1 - first.array, execution), known

    def decode(
        self, tokens: NamedArray, known: KnownTokens, place, first: NamedArray, execution: Execution
    ) -> tuple[NamedArray, KnownTokens]:
        """Return the logits after `tokens`, which are at the index `place` of padded rows; as `Llama.decode`."""
        at = place - first.array
        known = KnownTokens(known.tokens.at[jnp.arange(len(at)), at].set(tokens.array[:, 0]))
        return self._after(known, at, execution), known

    def _after(self, known: KnownTokens, at: jax.Array, execution: Execution) -> NamedArray:
        """Return the logits [batch, vocab] after the token at an index of each row."""
        slots = Axis(POSITION, known.tokens.shape[1])
        tokens = execution.placed(hax.named(known.tokens, (BATCH, slots)))
        positions = execution.placed(hax.arange(slots).broadcast_axis(tokens.resolve_axis(BATCH)))
        found = self.model.logits({"tokens": tokens, "positions": positions}, execution)
        found = found.rearrange((BATCH, POSITION, "vocab")).array
        return execution.placed(hax.named(found[jnp.arange(len(at)), at].astype(jnp.float32), (BATCH, "vocab")))


def sampling_form(model: Any, kind: str) -> Any:
    """Return a model as the generator needs it; raise `UserError` for one that cannot be sampled.

    - `kind`: its `model.type`, for the message
    """
    methods = ModelMethods.of(model)
    if methods.prefill is not None:
        return model
    if methods.logits is not None:
        return UncachedDecoder(model)
    raise UserError(f"model.type {kind} cannot be sampled: its model has neither `logits` nor `prefill` and `decode`.")


def scores(model: Any, batch: Batch, vocabulary: int | None, execution: Execution) -> tuple[NamedArray, NamedArray]:
    """Return each target's log-likelihood and whether it is the likeliest, as `Llama.scores`, of any model's logits."""
    if (own := ModelMethods.of(model).scores) is not None:
        return own(batch, vocabulary, execution)
    logits = model.logits(batch, execution).rearrange((..., "vocab")).array[..., :vocabulary].astype(jnp.float32)
    targets = batch["targets"]
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), targets.array[..., None], axis=-1)[..., 0]
    likeliest = jnp.argmax(logits, axis=-1) == targets.array
    return NamedArray(found, targets.axis_names), NamedArray(likeliest, targets.axis_names)


def check_scored(model: Any, kind: str) -> None:
    """Raise `UserError` for a model whose text cannot be scored token by token; arguments as for `sampling_form`."""
    methods = ModelMethods.of(model)
    if methods.scores is None and methods.logits is None:
        raise UserError(
            f"model.type {kind} cannot score tasks or sliding windows, or positions (evaluation.by_position): its "
            "model has neither `logits` nor `scores`. The loss on text needs neither."
        )


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


BUCKET = 64  # prompts are padded at least to multiples of this, so that few lengths are compiled
BLOCK = 32  # the maximum number of tokens in one call of the program
FIRST_SLOTS = 512  # of the caches, if a text may become that long


class Prompt(NamedTuple):
    """A prompt: token ids, at least one, and the seed of its continuation; it is padded as one of `room` tokens."""

    tokens: Sequence[int]
    seed: int = 0
    room: int = 0


class Rows(NamedTuple):
    """The constants of each row of a batch."""

    first: np.ndarray  # the index of its first token, int32 [row]
    seeds: np.ndarray  # random seeds, int32 [row]


class Last(NamedTuple):
    """The tokens before a block."""

    tokens: np.ndarray  # one of each row, int32 [row]
    over: np.ndarray  # whether a row has ended, bool [row]
    place: int  # the index of the tokens


class Generator:
    """Continues prompts with models of one shape; reuses its compiled programs for later batches and models.

    The rows of a batch are independent: the tokens drawn for a row depend on its tokens, its seed and its length. The
    shapes of a batch, which affect rounding, follow from its number of rows and its padded length (`width_of`).

    - `execution`: its layout may split the batch, if it divides the rows, and positions: then it splits the caches
    - `vocabulary`: tokens that may be drawn; a model's vocabulary may be padded beyond them
    - `ends`: the tokens that end a text, at least one
    - `options`: the compiler's options
    """

    def __init__(
        self, execution: Execution, vocabulary: int, ends: Collection[int], options: CompilerOptions | None = None
    ):
        self._execution, self._vocabulary, self._ends = execution, vocabulary, np.asarray(list(ends), np.int32)
        compiled = partial(jax.jit, compiler_options=options)
        self.read = compiled(self._read_prompts, static_argnames=("slots", "sampling"))
        self.draw = compiled(self._draw_block, static_argnames=("sampling",), donate_argnames=("caches",))
        self._widen = compiled(self._with_room, static_argnames=("slots",))

    def blocks(
        self,
        model: Any,
        prompts: Sequence[Prompt],
        count: int,
        sampling: Sampling,
        sizes: Iterator[int],
        is_over: Callable[[int], bool] = lambda row: False,
    ) -> Iterator[np.ndarray]:
        """Yield up to `count` tokens that continue each prompt, block by block: integers [row, token].

        The first block has one token a row, and one call of a program draws each of the others. Tokens in a row after
        one that ends a text are meaningless. Generation stops when all rows have ended.

        - `model`: as the execution runs it, with `prefill` and `decode` (`gregale.model.llama.Llama`); with its blocks
          `unstacked` no token copies weights or caches
        - `sampling`: its seed is ignored; the prompts have seeds
        - `sizes`: the maximum number of tokens of each block after the first, 1 to `BLOCK`; does not change the tokens
        - `is_over`: called after each block; returns whether a row needs no more tokens
        """
        ids, rows = filled(prompts, self._execution.layout.context)
        sampling = replace(sampling, seed=0)  # so that a seed does not need its own program
        known, max_tokens = ids.shape[1], ids.shape[1] + count  # known tokens, and the maximum of all tokens
        window = ModelMethods.of(model).window_of_all
        slots = slots_for(known, max_tokens, window)
        tokens, caches = self.read(model, ids, rows, slots=slots, sampling=sampling)
        drawn, over = np.asarray(tokens)[:, None], np.zeros(len(prompts), bool)
        while True:
            yield drawn
            known += drawn.shape[1]
            over |= np.isin(drawn, self._ends).any(axis=1)
            over |= [is_over(row) for row in range(len(prompts))]
            if known == max_tokens or over.all():
                return
            if slots_for(known, max_tokens, window) > slots:
                slots = slots_for(known, max_tokens, window)
                caches = self._widen(caches, slots=slots)
            wanted = min(next(sizes), max_tokens - known)
            if window is None or slots < window:
                wanted = min(wanted, slots + 1 - known)
            last = Last(drawn[:, -1], over, known - 1)
            block, caches = self.draw(model, rows, last, caches, wanted, sampling=sampling)
            drawn = np.asarray(block)[:, :wanted]

    def _read_prompts(self, model, ids, rows: Rows, slots: int, sampling: Sampling):
        """Return the tokens [row] after prompts `ids` [row, position], and the caches."""
        tokens, first = hax.named(ids, (BATCH, POSITION)), hax.named(rows.first, (BATCH,))
        logits, caches = model.prefill(tokens, first, slots, self._execution)
        return self._everywhere(self._drawn(logits, ids.shape[1] - 1, rows, sampling)), caches

    def _draw_block(self, model, rows: Rows, last: Last, caches, wanted, sampling: Sampling):
        """Return the `wanted` next tokens, [row, BLOCK], and the caches; fewer if all rows are over."""
        run, first, ends = for_tokens(self._execution), hax.named(rows.first, (BATCH,)), jnp.asarray(self._ends)

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
        def is_cache(node: Any) -> bool:
            return hasattr(node, "with_room")

        return jax.tree.map(lambda cache: cache.with_room(slots, self._execution), caches, is_leaf=is_cache)

    def _drawn(self, logits: NamedArray, place, rows: Rows, sampling: Sampling) -> jax.Array:
        """Return the tokens [row] after those at an index; a row's seed and its position there give the randomness.

        A device draws for its own rows: the partitioner would gather all rows to sort one.
        """

        def one(logits, seed, position):
            key = jax.random.fold_in(jax.random.key(seed), position)
            return draw(logits[: self._vocabulary], sampling, key).astype(jnp.int32)

        layout = self._execution.layout
        each, all_of_a_row = (layout.spec(axes, layout.compute) for axes in ((BATCH,), (BATCH, "token")))
        drawn = layout.shard_map(jax.vmap(one), (all_of_a_row, each, each), each)
        return drawn(logits.rearrange((BATCH, "vocab")).array, rows.seeds, place - rows.first)

    def _everywhere(self, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, self._execution.layout.sharding((), {}))


def filled(prompts: Sequence[Prompt], devices: int = 1) -> tuple[np.ndarray, Rows]:
    """Return token ids [row, index], padded on the left, and the constants of the rows.

    - `devices`: that share a prompt
    """
    width = max(width_of(max(len(prompt.tokens), prompt.room), devices) for prompt in prompts)
    ids = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.tokens) :] = prompt.tokens
    first, seeds = [width - len(prompt.tokens) for prompt in prompts], [prompt.seed for prompt in prompts]
    return ids, Rows(np.asarray(first, np.int32), np.asarray(seeds, np.int32))


def width_of(tokens: int, devices: int = 1) -> int:
    """Return the padded length of a prompt: the padding is less than `BUCKET`, or less than a quarter.

    So there are four lengths for each doubling, and a program for each. The `devices` that share a prompt have two
    equal parts of it each (`axes.position_order`).
    """
    return multiple_of(lcm(max(BUCKET, 1 << max(tokens.bit_length() - 3, 0)), 2 * devices), tokens)


def slots_for(tokens: int, max_tokens: int, window: int | None) -> int:
    """Return the slots of the caches for this number of tokens: a power of two, so that few sizes are compiled, or
    `max_tokens`.

    Attention covers all slots: at most twice the number of tokens, or `FIRST_SLOTS`. A sliding window limits them to
    its width, since a later token reuses the slot of a token outside the window.
    """
    slots = min(multiple_of(BUCKET, max_tokens), max(FIRST_SLOTS, 1 << tokens.bit_length()))
    return slots if window is None else min(slots, multiple_of(BUCKET, window))


def multiple_of(bucket: int, size: int) -> int:
    return -(-size // bucket) * bucket
