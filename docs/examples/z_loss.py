"""A model: Llama with a z-loss (PaLM, arXiv 2204.02311), which keeps the sums of its softmax near one."""

from dataclasses import dataclass

import haliax as hax

from gregale.model.base import ModelConfig
from gregale.model.config import LlamaConfig
from gregale.model.llama import Llama
from gregale.model.losses import Losses
from gregale.settings import at_least, setting


@ModelConfig.register_subclass("z_llama")
@dataclass(frozen=True)
class ZLlamaConfig(LlamaConfig):
    """Llama with a z-loss."""

    z_loss: float = setting(1e-4, "coefficient of the squared logarithm of the softmax's sum", range=at_least(0))

    def init(self, Vocab, key):
        return ZLlama.init(self, Vocab, key)


class ZLlama(Llama):
    exports_as_llama = True  # only the loss differs

    def loss(self, batch, execution):
        loss, weight = super().loss(batch, execution)
        if execution.evaluates:
            return loss, weight
        z = hax.nn.logsumexp(self.logits(batch, execution), axis="vocab")
        z_loss = self.config.z_loss * hax.sum(hax.square(z) * batch["loss_mask"]).scalar()
        norms = hax.sum(hax.abs(z) * batch["loss_mask"]).scalar()
        return Losses(loss, weight, auxiliary={"z_loss": z_loss}, metrics={"abs_log_z": norms})
