"""The gated MLP of a layer."""

import equinox as eqx
import jax
from haliax import Axis, NamedArray
from haliax.nn import Linear

from gregale.model.attention import linear
from gregale.model.config import DecoderConfig
from gregale.model.execution import Execution
from gregale.model.remat import named


class Mlp(eqx.Module):
    """SwiGLU or GeGLU (arXiv 2002.05202): down(activation(gate(x)) * up(x))."""

    gate: Linear  # [Embed] -> [Mlp]
    up: Linear  # [Embed] -> [Mlp]
    down: Linear  # [Mlp] -> [Embed]
    activation: str = eqx.field(static=True)

    @staticmethod
    def init(config: DecoderConfig, key, Width: Axis) -> "Mlp":
        keys = jax.random.split(key, 3)
        c = config
        return Mlp(
            gate=linear(c.Embed, Width, c.init_scale, keys[0]),
            up=linear(c.Embed, Width, c.init_scale, keys[1]),
            down=linear(Width, c.Embed, c.init_scale / (2 * c.layers) ** 0.5, keys[2]),
            activation=c.activation,
        )

    def __call__(self, x: NamedArray, execution: Execution) -> NamedArray:
        fed = execution.mlp(x, (self.gate, self.up, self.down), self.activation)
        if fed is not None:
            return execution.summed(fed, "mlp_out")
        gate = named(execution.placed(execution.project(self.gate, x)), "gate")
        up = named(execution.placed(execution.project(self.up, x)), "up")
        gated = {"silu": execution.kernels.swiglu, "gelu": execution.kernels.geglu}[self.activation]
        product = gated(gate, up)  # activation(gate) * up
        return execution.summed(execution.project(self.down, product), "mlp_out")
