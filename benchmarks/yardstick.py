"""The yardstick: Gregale's benchmark model as one plain JAX function, without named axes, replicas or microbatches.

A dictionary of arrays, `lax.scan` over layers, full logits, optax. It is what one writes by hand for this one model on
this one mesh; `benchmarks/step.py` times Gregale's step beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

EPSILON = 1e-5
ROTARY_BASE = 10000.0

# Each matrix is split over `model` (tensor parallelism) and over `data` (FSDP), and repeated over `replica`.
PARAMETERS = {
    "embedding": P("model", "data"),  # [vocab, embed]
    "attention_norm": P(None, "data"),  # [layers, embed]
    "query": P(None, "data", "model", None),  # [layers, embed, heads, head_size]
    "key": P(None, "data", "model", None),
    "value": P(None, "data", "model", None),
    "out": P(None, "model", None, "data"),  # [layers, heads, head_size, embed]
    "mlp_norm": P(None, "data"),
    "gate": P(None, "data", "model"),  # [layers, embed, mlp]
    "up": P(None, "data", "model"),
    "down": P(None, "model", "data"),  # [layers, mlp, embed]
    "norm": P("data"),  # [embed]
    "head": P("data", "model"),  # [embed, vocab]
}
OUTSIDE_LAYERS = ("embedding", "norm", "head")

Parameters = dict[str, jax.Array]
State = tuple[Parameters, optax.OptState]


@dataclass(frozen=True)
class Yardstick:
    """The plain step on a mesh with axes `replica`, `data` and `model`, placed by hand.

    - `tx`: any optax transformation
    - `unroll`: layers unrolled in the scan over layers
    """

    mesh: Mesh
    tx: optax.GradientTransformation
    unroll: int

    def place(self, x: jax.Array, *spec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def activation(self, x: jax.Array) -> jax.Array:
        return self.place(x, ("replica", "data"))

    def init(self, parameters: Parameters) -> State:
        """The state before the first step: each moment lies as its parameter does. Call it under `jax.jit`."""
        shardings = {name: NamedSharding(self.mesh, spec) for name, spec in PARAMETERS.items()}
        parameters = jax.lax.with_sharding_constraint(parameters, shardings)
        moments = optax.tree.map_params(self.tx, jax.lax.with_sharding_constraint, self.tx.init(parameters), shardings)
        return parameters, moments

    def gather(self, weights: Parameters) -> Parameters:
        """Weights, of one layer where they belong to layers, brought together over `data`; still split over `model`."""
        gathered = {}
        for name, weight in weights.items():
            spec = PARAMETERS[name] if name in OUTSIDE_LAYERS else PARAMETERS[name][1:]
            gathered[name] = self.place(weight, *(axis if axis == "model" else None for axis in spec))
        return gathered

    def block(self, x: jax.Array, weights: Parameters) -> jax.Array:
        w = self.gather(weights)
        h = rms_norm(x, w["attention_norm"])
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, w[name]) for name in ("query", "key", "value"))
        attended = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = self.activation(x + jnp.einsum("bshd,hde->bse", attended, w["out"]))
        h = rms_norm(x, w["mlp_norm"])
        return self.activation(x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"])

    def loss(self, parameters: Parameters, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean next-token loss (nats) of tokens and targets, both [batch, position]."""
        outer = self.gather({name: parameters[name] for name in OUTSIDE_LAYERS})
        layers = {name: array for name, array in parameters.items() if name not in OUTSIDE_LAYERS}
        x = self.activation(outer["embedding"][tokens])
        x, _ = jax.lax.scan(lambda x, w: (self.block(x, w), None), x, layers, unroll=self.unroll)
        logits = self.place(rms_norm(x, outer["norm"]) @ outer["head"], ("replica", "data"), None, "model")
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(self, state: State, tokens: jax.Array, targets: jax.Array):
        """One step of the optimizer: the next state, and (loss, norm of the gradient)."""
        parameters, optimizer_state = state
        loss, gradients = jax.value_and_grad(self.loss)(parameters, tokens, targets)
        gradients = {name: self.place(gradient, *PARAMETERS[name]) for name, gradient in gradients.items()}
        updates, optimizer_state = self.tx.update(gradients, optimizer_state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        return (parameters, optimizer_state), (loss, optax.global_norm(gradients))


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPSILON) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding of [batch, position, heads, head_size]."""
    half = x.shape[-1] // 2
    frequency = ROTARY_BASE ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
