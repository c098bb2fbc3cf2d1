"""A linear layer with a low-rank adapter (LoRA, arXiv 2106.09685)."""

from typing import Any

import equinox as eqx
from haliax.nn import Linear


class Lora(Linear):
    """A linear layer of a model that computes, with an adapter: y = x W + bias + scale * (x A) B.

    `gregale.model.execution.Execution.project` computes it: A B, which has the size of W, is never made.

    - `dropout`: share of the values of x that are zero for A in training; the others are divided by the rest
    """

    lora_a: Linear = eqx.field(kw_only=True)  # A: [*In] -> [LoraRank]
    lora_b: Linear = eqx.field(kw_only=True)  # B: [LoraRank] -> [*Out]
    scale: float = eqx.field(static=True, kw_only=True)
    dropout: float = eqx.field(static=True, kw_only=True)

    @property
    def base(self) -> Linear:
        """Return the layer without its adapter."""
        return Linear(self.weight, self.bias, self.In, self.Out)

    def __call__(self, inputs: Any, *, key: Any = None) -> Any:
        raise TypeError("a layer with an adapter is computed by `Execution.project(layer, x)`")
