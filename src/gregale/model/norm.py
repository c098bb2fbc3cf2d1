"""RMSNorm over a named axis."""

from __future__ import annotations

import equinox as eqx
import haliax as hax
from haliax import Axis, NamedArray

from gregale.model.execution import Execution


class RmsNorm(eqx.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467); all but the product with the weight in float32."""

    weight: NamedArray  # [Over]
    epsilon: float = eqx.field(static=True)

    @staticmethod
    def init(Over: Axis, epsilon: float) -> RmsNorm:
        return RmsNorm(hax.ones(Over), epsilon)

    def __call__(self, x: NamedArray, execution: Execution) -> NamedArray:
        """[..., Over] -> the same, in the dtype of `x`."""
        return execution.kernels.rms_norm(x.rearrange((..., *self.weight.axes)), self.weight, self.epsilon)
