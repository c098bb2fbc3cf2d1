"""The held-out loss of a model, in nats a token and in bits a byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np

from gregale.data.examples import Examples
from gregale.programs.run.batches import GlobalBatches
from gregale.programs.run.setup import Setup


class Evaluator:
    """Takes the loss on held-out examples; compiled once.

    - `held_out`: finite examples, each scored once
    - `token_bytes`: bytes of text that each token stands for, [tokens]
    """

    def __init__(self, setup: Setup, held_out: Examples, token_bytes: np.ndarray):
        self._setup, self._held_out = setup, held_out
        execution = setup.evaluation_execution()
        sizes = np.zeros(setup.Vocab.size, np.float32)
        sizes[: len(token_bytes)] = token_bytes

        def sums(model, batch):
            loss, weight = model.loss(batch, execution)
            scored = jnp.asarray(sizes)[batch["targets"].array] * batch["loss_mask"].array
            return loss, weight, scored.sum()

        self._sums: Callable = jax.jit(sums, out_shardings=setup.layout.sharding((), {}))

    def __call__(self, model, batches: int | None) -> dict[str, float]:
        """`eval_loss` (nats a token) and `bits_per_byte`, over the first `batches` held-out batches or all."""
        totals = None
        with GlobalBatches(self._held_out, self._setup.batch_axes, self._setup.layout) as held_out:
            for batch in islice(held_out, batches):
                sums = self._sums(model, batch)
                totals = sums if totals is None else jax.tree.map(jnp.add, totals, sums)
        loss, weight, scored = (float(total) for total in totals or (0.0, 0.0, 0.0))
        return {
            "eval_loss": loss / weight if weight else math.nan,
            "bits_per_byte": loss / math.log(2) / scored if scored else math.nan,
        }
