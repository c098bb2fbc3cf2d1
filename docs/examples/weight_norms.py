"""A callback: the largest norm of an array of weights in every step, and the names of the largest ones now and then."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp

from gregale.settings import setting, whole
from gregale.tracking.callback import Callback, CallbackConfig


@CallbackConfig.register_subclass("weight_norms")
@dataclass(frozen=True)
class WeightNormsConfig(CallbackConfig):
    """Norms of the arrays of weights."""

    every: int = setting(100, "number of steps between two lists of the largest arrays", range=whole(1))
    count: int = setting(3, "number of arrays in a list", range=whole(1))

    def build(self) -> Callback:
        return WeightNorms(self)


class WeightNorms(Callback):
    def __init__(self, config: WeightNormsConfig):
        self._config = config

    def metrics(self, model, batch, execution):
        """Part of the compiled step: it costs no wait."""
        found = norms(model).values()
        return {"weight_norm_max": jnp.max(jnp.stack([*found]))}

    def on_start(self, run):
        self._run = run

    def waits_after(self, step):
        return step % self._config.every == 0

    def after_step(self, pause):
        """The loop waits for this: it reads the state."""
        found = jax.device_get(jax.jit(norms)(eqx.filter(pause.model, eqx.is_array)))
        largest = sorted(found, key=found.get, reverse=True)[: self._config.count]
        if self._run.is_writer:
            with open(self._run.files / "largest_weights.txt", "a", encoding="utf-8") as file:
                file.write(f"step {pause.step}: {', '.join(largest)}\n")
        return {"weight_norm_median": sorted(map(float, found.values()))[len(found) // 2]}


def norms(model) -> dict[str, jax.Array]:
    """Return the norm of each array of floating-point numbers, by its path in the model."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_inexact_array))
    return {
        jax.tree_util.keystr(path): jnp.sqrt(jnp.sum(jnp.square(leaf.astype(jnp.float32)))) for path, leaf in leaves
    }
