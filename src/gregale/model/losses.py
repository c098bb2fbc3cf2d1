"""The sums that a model's loss returns, and the treatment of its logits."""

from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from haliax import NamedArray

Z_LOSS = "z_loss"  # a term
LARGEST_LOGITS = "largest_logits"  # of attention, a maximum


class Losses(NamedTuple):
    """The sums over the tokens of a batch that a model's `loss` returns, float32 scalars, but for the last two.

        trained:    (loss + sum of auxiliary) / weight
        evaluated:  loss / weight

    Sums and weight are added over microbatches, replicas and devices, and divided once.

    - `loss`: the sum of the tokens' losses, each times its weight
    - `weight`: the sum of the weights
    - `auxiliary`: further terms by name, such as a z-loss: they have gradients, and are no part of a held-out loss
    - `metrics`: sums by name that are only logged
    - `statistics`: sums by name, named arrays of any axes but those of the batch, for the model's `update_buffers`
    - `maxima`: largest values by name, likewise, for `Psdp.after_update`

    A step logs each auxiliary term and metric by its name, divided by the weight.
    """

    loss: jax.Array
    weight: jax.Array
    auxiliary: Mapping[str, jax.Array] = {}
    metrics: Mapping[str, jax.Array] = {}
    statistics: Mapping[str, NamedArray] = {}
    maxima: Mapping[str, NamedArray] = {}

    @property
    def trained(self) -> jax.Array:
        """Return the sum whose gradient is computed."""
        return reduce(jnp.add, self.auxiliary.values(), self.loss)

    @property
    def named(self) -> dict[str, jax.Array]:
        """Return the sums that are logged by their names."""
        return {**self.auxiliary, **self.metrics}


def losses_of(found: Any) -> Losses:
    """Return what a loss returned, `Losses` or the pair (loss, weight), as `Losses`."""
    return found if isinstance(found, Losses) else Losses(*found)


class Logits(NamedTuple):
    """The treatment of the products with the head."""

    cap: float | None = None  # limits them by tanh; None: no limit
    rows: int | None = None  # rows of the head that are tokens; later rows are padding, without logits. None: all
    z_loss: float = 0.0  # coefficient of the squared logarithm of the softmax's sum (PaLM, arXiv 2204.02311)
