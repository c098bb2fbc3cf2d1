"""An objective of pairs without a reference: ORPO (Hong et al. 2024, arXiv 2403.07691)."""

from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp

from gregale.model.losses import Losses
from gregale.objectives import ObjectiveConfig, of_pairs
from gregale.settings import above, setting


@ObjectiveConfig.register_subclass("orpo")
@dataclass(frozen=True)
class OrpoConfig(ObjectiveConfig):
    """The chosen answer's loss a token - strength * log sigmoid(log of the ratio of the answers' odds)."""

    rows_together = 2

    strength: float = setting(0.1, "weight of the odds ratio", range=above(0))

    def loss(self, passes):
        tokens = passes.supervised
        weights = jnp.minimum(*of_pairs(tokens)) > 0
        by_token = of_pairs(passes.log_probs(passes.model) / hax.maximum(tokens, 1.0))
        chosen, rejected = (jnp.where(weights, each, -1.0) for each in by_token)
        ratio = log_odds(chosen) - log_odds(rejected)
        each = -chosen - self.strength * jax.nn.log_sigmoid(ratio)
        metrics = {"log_odds_ratio": jnp.sum(weights * ratio)}
        return Losses(jnp.sum(weights * each), jnp.sum(weights, dtype=jnp.float32), metrics=metrics)


def log_odds(log_p: jax.Array) -> jax.Array:
    """Return log(p / (1 - p)) of log p < 0."""
    return log_p - jnp.log(-jnp.expm1(log_p))
