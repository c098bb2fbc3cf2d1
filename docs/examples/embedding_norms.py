"""A callback: the largest norm of an embedding in every step, and the least used tokens at every hundredth step."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from gregale.settings import setting, whole
from gregale.tracking.callback import Callback, CallbackConfig


@CallbackConfig.register_subclass("embedding_norms")
@dataclass(frozen=True)
class EmbeddingNormsConfig(CallbackConfig):
    """Norms of the rows of the embedding table."""

    every: int = setting(100, "number of steps between two lists of small norms", range=whole(1))
    count: int = setting(5, "number of tokens in a list", range=whole(1))

    def build(self) -> Callback:
        return EmbeddingNorms(self.every, self.count)


class EmbeddingNorms(Callback):
    def __init__(self, every: int, count: int):
        self._every, self._count = every, count
        self._run = None

    def metrics(self, model, batch, execution):
        """Part of the compiled step, so it costs no wait."""
        return {"embedding_norm_max": jnp.max(norms(model))}

    def on_start(self, run):
        self._run = run

    def waits_after(self, step):
        return step % self._every == 0

    def after_step(self, pause):
        found = np.asarray(jax.device_get(norms(pause.model)))
        smallest = np.argsort(found)[: self._count]
        if self._run.is_writer:
            with open(self._run.files / "small_norms.txt", "a", encoding="utf-8") as file:
                file.write(f"{pause.step}: {smallest.tolist()}\n")
        return {"embedding_norm_median": float(np.median(found))}


def norms(model) -> jax.Array:
    """Return the norm of each row of the table [vocab]."""
    table = model.embedding.rearrange(("vocab", "embed")).array.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(jnp.square(table), axis=1))
