"""RMSNorm over named axes."""

from __future__ import annotations

import equinox as eqx
import haliax as hax
from haliax import Axis, NamedArray

from gregale.model.execution import Execution

CHANNEL = "channel"  # of several axes, one after the other


class RmsNorm(eqx.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467); all but the product with the weight in float32."""

    weight: NamedArray  # [*Over]
    epsilon: float = eqx.field(static=True)

    @staticmethod
    def init(Over: Axis | tuple[Axis, ...], epsilon: float) -> RmsNorm:
        return RmsNorm(hax.ones(Over), epsilon)

    def __call__(self, x: NamedArray, execution: Execution) -> NamedArray:
        """[..., *Over] -> the same, in the dtype of `x`; the mean is that of all of its axes together."""
        over = self.weight.axes
        x = x.rearrange((..., *over))
        if len(over) == 1:
            return execution.kernels.rms_norm(x, self.weight, self.epsilon)
        found = execution.kernels.rms_norm(
            x.flatten_axes(over, CHANNEL), self.weight.flatten_axes(over, CHANNEL), self.epsilon
        )
        return found.unflatten_axis(CHANNEL, over)
