"""Experts that lie on several devices: tokens are sent to the devices of their experts, and their outputs back.

Each device has `experts / devices` of the experts. A round sends a fixed number of rows to each of them, a little more
than an even share, by one all-to-all. No token is dropped: if one device gets more, further rounds send the rest. The
number of rounds is the largest of the group, so that all its devices take part in each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gregale.axes.parameters import FURTHER_ROUNDS, rows_to_a_device
from gregale.model.kernels.grouped_mlp import GroupedMlp


class Sent(NamedTuple):
    """The rows that a device has got in a round, sorted by its experts."""

    sizes: jax.Array  # the rows of each expert
    order: jax.Array  # the places of sorted rows in the order of arrival
    factors: jax.Array  # the weight of each row, 0 of empty ones; [rows, 1]
    rows: list[jax.Array]


@dataclass(frozen=True)
class Exchange:
    """The computation of one device inside of `jax.shard_map`; outputs are addends over the mesh axes of `mlp`.

    Weights are those of `GroupedMlp`, of this device's experts.

    - `axes`: the mesh axes that split the experts
    - `devices`: their product
    - `group`: mesh axes whose devices have the same number of rounds
    """

    experts: int
    axes: tuple[str, ...]
    devices: int
    group: tuple[str, ...]
    mlp: GroupedMlp

    def forward(self, x, experts, weights, *matrices) -> jax.Array:
        """Return the sum of each token's experts, float32 [tokens..., embed]."""
        route = Route(self, experts)

        def one(number) -> jax.Array:
            sent = route.sent(number, weights, x)
            inner = self.mlp.inner(sent.rows[0], sent.sizes, matrices)
            out = self.mlp.outer(inner, sent.factors.astype(x.dtype), sent.sizes, matrices)
            return route.summed(route.returned(number, out, sent), x.shape)

        return route.over_rounds(one)

    def backward(self, cotangent, x, experts, weights, *matrices) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Return the gradients by x, by the weights of tokens, and by the weights of this device's experts."""
        route = Route(self, experts)

        def one(number) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
            sent = route.sent(number, weights, x, cotangent)
            (rows, by_rows), factors = sent.rows, sent.factors.astype(x.dtype)
            inner = self.mlp.inner(rows, sent.sizes, matrices)
            by_x, by_weights, gradients = self.mlp.backward(rows, by_rows, inner, factors, sent.sizes, matrices)
            by_x = route.summed(route.returned(number, by_x, sent), x.shape)
            return by_x, route.returned(number, by_weights[:, None], sent).reshape(weights.shape), gradients

        return route.over_rounds(one)


class Route:
    """The places of a device's (token, expert) pairs: sorted by expert, and so by device."""

    def __init__(self, exchange: Exchange, experts: jax.Array):
        self.exchange, self.active = exchange, experts.shape[-1]
        devices, self.own = exchange.devices, exchange.experts // exchange.devices
        self.flat = experts.reshape(-1)
        self.each = rows_to_a_device(self.flat.size, devices)
        self.device = self.flat // self.own
        self.order = jnp.argsort(self.flat, stable=True).astype(jnp.int32)
        self.places = inverse(self.order)
        self.counts = (self.device[:, None] == jnp.arange(devices)).sum(0, dtype=jnp.int32)
        self.starts = jnp.cumsum(self.counts) - self.counts
        self.rounds = jax.lax.pmax(-(-self.counts.max() // self.each), exchange.group)

    def sent(self, number, weights: jax.Array, *tokens: jax.Array) -> Sent:
        """Send a round's rows of some arrays [tokens..., n] to the devices of their experts."""
        places = number * self.each + jnp.arange(self.each)
        held = places < self.counts[:, None]
        pairs = self.order.at[self.starts[:, None] + places].get(mode="clip")  # [devices, each]
        experts = self._across(jnp.where(held, self.flat[pairs] % self.own, self.own)).reshape(-1)
        factors = self._across(jnp.where(held, weights.reshape(-1)[pairs], 0)).reshape(-1, 1)
        order = jnp.argsort(experts, stable=True).astype(jnp.int32)
        rows = [self._across(each.reshape(-1, each.shape[-1])[pairs // self.active]) for each in tokens]
        sizes = (experts[:, None] == jnp.arange(self.own)).sum(0, dtype=jnp.int32)
        return Sent(sizes, order, factors[order], [each.reshape(-1, each.shape[-1])[order] for each in rows])

    def returned(self, number, found: jax.Array, sent: Sent) -> jax.Array:
        """Send rows back to their tokens: [pairs, n], zeros for pairs of other rounds."""
        arrived = found[inverse(sent.order)].reshape(self.exchange.devices, self.each, -1)
        back = self._across(arrived).reshape(-1, arrived.shape[-1])
        place = self.places - self.starts[self.device]
        slot, here = self.device * self.each + place % self.each, place // self.each == number
        return jnp.where(here[:, None], back[slot], 0)

    def summed(self, pairs: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the sum of each token's pairs, float32."""
        return pairs.reshape(*shape[:-1], self.active, shape[-1]).sum(-2, dtype=jnp.float32)

    def over_rounds(self, one: Callable[[Any], Any]) -> Any:
        """Return the sum of all rounds; in practice the first is the only one."""

        def further(carry):
            return carry[0] + 1, jax.tree.map(jnp.add, carry[1], one(carry[0]))

        first = (jnp.int32(1), one(0))
        with jax.named_scope(FURTHER_ROUNDS):
            return jax.lax.while_loop(lambda carry: carry[0] < self.rounds, further, first)[1]

    def _across(self, parts: jax.Array) -> jax.Array:
        """Exchange [devices, ...]: part d goes to device d."""
        return jax.lax.all_to_all(parts, self.exchange.axes, 0, 0)


def inverse(order: jax.Array) -> jax.Array:
    """Return the place of each number in an order."""
    numbers = jnp.arange(order.size, dtype=jnp.int32)
    return jnp.zeros_like(numbers).at[order].set(numbers, unique_indices=True)
