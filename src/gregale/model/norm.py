"""RMSNorm over named axes."""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from gregale.model.config import DecoderConfig
from gregale.model.execution import Execution

CHANNEL = "channel"  # of several axes, one after the other


class RmsNorm(eqx.Module):
    """x / sqrt(mean(x^2) + epsilon) * (weight + offset), arXiv 1910.07467; all but the product in float32."""

    weight: NamedArray  # [*Over]
    epsilon: float = eqx.field(static=True)
    offset: float = eqx.field(static=True, default=0.0)

    @staticmethod
    def init(Over: Axis | tuple[Axis, ...], config: DecoderConfig) -> "RmsNorm":
        """Return a norm with multiplier 1."""
        return RmsNorm(hax.full(Over, 1 - config.norm_offset, jnp.float32), config.norm_epsilon, config.norm_offset)

    def __call__(self, x: NamedArray, execution: Execution, square: NamedArray | None = None) -> NamedArray:
        """Map [..., *Over] to the same in the dtype of `x`; the mean is over all of these axes together.

        - `square`: the mean square of `x`, if it is known, in case of one axis
        """
        over = self.weight.axes
        x = x.rearrange((..., *over))
        weight = self.weight if self.offset == 0 else self.weight + self.offset
        if len(over) == 1:
            known = None if square is None else square.rearrange(x.axes[:-1]).array
            return execution.kernels.rms_norm(x, weight, self.epsilon, known)
        found = execution.kernels.rms_norm(
            x.flatten_axes(over, CHANNEL), weight.flatten_axes(over, CHANNEL), self.epsilon, None
        )
        return found.unflatten_axis(CHANNEL, over)
