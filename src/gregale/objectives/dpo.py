"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gregale.model.losses import Losses
from gregale.objectives.base import ObjectiveConfig, Passes, of_pairs
from gregale.settings import above, setting


@ObjectiveConfig.register_subclass("dpo")
@dataclass(frozen=True)
class DpoConfig(ObjectiveConfig):
    """DPO (arXiv 2305.18290): -log sigmoid(reward of chosen - reward of rejected), a mean over pairs.

    The reward of an answer is beta * (log p(answer) - log p_reference(answer)), with sums over its tokens. The
    reference is the model without its adapters, or without adapters the model of `start_from`.
    """

    rows_together = 2
    needs_reference = True

    beta: float = setting(0.1, "scale of the rewards", range=above(0), aliases=("dpo_beta",), by_topic=True)

    def loss(self, passes: Passes) -> Losses:
        """Return the sums over pairs; one without targets in both rows has the weight 0."""
        reference = passes.log_probs(passes.reference)
        rewards = self.beta * (passes.log_probs(passes.model) - jax.lax.stop_gradient(reference))
        chosen, rejected = of_pairs(rewards)
        weights = jnp.minimum(*of_pairs(passes.supervised)) > 0
        margin = chosen - rejected
        metrics = {"margin": margin, "accuracy": margin > 0, "chosen": chosen, "rejected": rejected}
        return Losses(
            jnp.sum(weights * -jax.nn.log_sigmoid(margin)),
            jnp.sum(weights, dtype=jnp.float32),
            metrics={f"reward_{name}": jnp.sum(weights * each) for name, each in metrics.items()},
        )
