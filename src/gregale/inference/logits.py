"""Forms in which any model with `logits` is sampled and scored."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH
from gregale.errors import UserError
from gregale.model.cache import POSITION
from gregale.model.config import Batch
from gregale.model.execution import Execution


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
    if hasattr(model, "prefill"):
        return model
    if hasattr(model, "logits"):
        return UncachedDecoder(model)
    raise UserError(f"model.type {kind} cannot be sampled: its model has neither `logits` nor `prefill` and `decode`.")


def scores(model: Any, batch: Batch, vocabulary: int | None, execution: Execution) -> tuple[NamedArray, NamedArray]:
    """Return each target's log-likelihood and whether it is the likeliest, as `Llama.scores`, of any model's logits."""
    if hasattr(model, "scores"):
        return model.scores(batch, vocabulary, execution)
    logits = model.logits(batch, execution).rearrange((..., "vocab")).array[..., :vocabulary].astype(jnp.float32)
    targets = batch["targets"]
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), targets.array[..., None], axis=-1)[..., 0]
    likeliest = jnp.argmax(logits, axis=-1) == targets.array
    return NamedArray(found, targets.axis_names), NamedArray(likeliest, targets.axis_names)


def check_scored(model: Any, kind: str) -> None:
    """Raise `UserError` for a model whose text cannot be scored token by token; arguments as for `sampling_form`."""
    if not hasattr(model, "scores") and not hasattr(model, "logits"):
        raise UserError(
            f"model.type {kind} cannot score tasks or sliding windows, or positions (evaluation.by_position): its "
            "model has neither `logits` nor `scores`. The loss on text needs neither."
        )
