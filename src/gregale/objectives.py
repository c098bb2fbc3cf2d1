"""Training objectives by `type`: the loss of the next token, or of preferences (DPO)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import draccus
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.axes.layout import BATCH, POSITION
from gregale.axes.parameters import with_arrays
from gregale.inference.generate import scores
from gregale.model.adapters import without_adapters
from gregale.model.config import Batch
from gregale.model.execution import Execution
from gregale.model.losses import Losses
from gregale.settings import Settings, above, setting


@dataclass(frozen=True)
class Passes:
    """The batch of an objective, and forward passes on it.

    - `model`: the model that is trained; its `loss` and `logits` are another way to a pass
    - `batch`: `tokens`, `targets`, `loss_mask`, `positions` and `segment_ids`: [batch, position] each
    - `vocabulary`: first columns of the head that are tokens; None: all
    - `frozen`: the parameters of the reference; None: those beside the model's adapters
    """

    model: Any
    batch: Batch
    execution: Execution
    vocabulary: int | None = None
    frozen: Any = None

    @property
    def reference(self) -> Any:
        """Return the model with its frozen weights alone: those beside adapters, or those before the first step."""
        return without_adapters(self.model) if self.frozen is None else with_arrays(self.model, self.frozen)

    @property
    def supervised(self) -> NamedArray:
        """Return the number of targets that the loss is on, float32 [batch]."""
        return hax.sum(self.batch["loss_mask"], POSITION)

    def log_probs(self, model: Any) -> NamedArray:
        """Return the sum of log p(target) over the targets of a row that the loss is on, nats, float32 [batch].

        It is one forward pass; gradients are computed in the same blocks of tokens as those of the next-token loss.
        """
        found, _ = scores(model, self.batch, self.vocabulary, self.execution)
        return hax.sum(hax.where(self.batch["loss_mask"] > 0, found, 0.0), POSITION)


def of_pairs(rows: NamedArray) -> tuple[jax.Array, jax.Array]:
    """Return the values of the chosen and of the rejected rows: [batch] -> [pair] twice."""
    pairs = rows.rearrange((BATCH,)).array.reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


@dataclass(frozen=True)
class ObjectiveConfig(Settings, draccus.ChoiceRegistry):
    """The choice of an objective by `type`."""

    rows_together: ClassVar[int] = 1  # 2: rows 2k and 2k + 1 of a batch are a pair, of sources with `form: pairs`
    needs_reference: ClassVar[bool] = False  # it computes with `Passes.reference`; without an adapter a second copy
    is_models_own: ClassVar[bool] = False  # it is the model's `loss`

    @classmethod
    def default_choice_name(cls) -> str:
        return "next_token"

    def loss(self, passes: Passes) -> Losses | tuple[jax.Array, jax.Array]:
        """Return sums over the batch, as a model's `loss` does."""
        raise TypeError(f"{type(self).__name__} computes no loss; choose an objective by its type")


@ObjectiveConfig.register_subclass("next_token")
@dataclass(frozen=True)
class NextTokenConfig(ObjectiveConfig):
    """The loss of the model: of each next token that the mask has."""

    is_models_own = True

    def loss(self, passes: Passes) -> Losses | tuple[jax.Array, jax.Array]:
        return passes.model.loss(passes.batch, passes.execution)


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
