"""A model: Llama with a confidence penalty (Pereyra et al. 2017, arXiv 1701.06548), which rewards entropy."""

from dataclasses import dataclass

import haliax as hax

from gregale.model.config import ModelConfig
from gregale.model.llama import Llama, LlamaConfig
from gregale.model.losses import losses_of
from gregale.settings import at_least, setting


@ModelConfig.register_subclass("unsure_llama")
@dataclass(frozen=True)
class UnsureLlamaConfig(LlamaConfig):
    """Llama with a confidence penalty."""

    penalty: float = setting(0.1, "coefficient of the negative entropy of a token's probabilities", range=at_least(0))

    def init(self, Vocab, key):
        return UnsureLlama.init(self, Vocab, key)


class UnsureLlama(Llama):
    exports_as_llama = True  # only the loss differs

    def loss(self, batch, execution):
        own = losses_of(super().loss(batch, execution))
        if execution.evaluates:
            return own
        logs = hax.nn.log_softmax(self.logits(batch, execution), axis="vocab")
        entropy = -hax.sum(hax.exp(logs) * logs, "vocab") * batch["loss_mask"]
        penalty = -self.config.penalty * hax.sum(entropy).scalar()
        metrics = {**own.metrics, "entropy": hax.sum(entropy).scalar()}
        return own._replace(auxiliary={**own.auxiliary, "confidence_penalty": penalty}, metrics=metrics)
