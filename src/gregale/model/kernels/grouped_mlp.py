"""The gated MLPs of groups, such as experts, on rows that are sorted by group.

    y[r] = factor[r] * (gated(x[r] . gate + its bias, x[r] . up + its bias) . down^T + its bias),  of the group of row r

The weights of a call are gate, up and down, [groups, embed, mlp] each. Their biases may follow: those of gate and up,
[groups, mlp], and that of down, [groups, embed]. Products of 8-bit numbers take `Integers` in place of the matrices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gregale.model.kernels.grouped import GroupedProducts, of_groups, sums_of_groups


@dataclass(frozen=True)
class GroupedMlp:
    """The computation of one device; outputs are addends over the devices that split `mlp`.

    - `gated(gate, up)`: the gate's activation times up
    - `devices`: those that split `mlp`; each adds its share of the bias of down
    """

    products: GroupedProducts
    gated: Callable[[jax.Array, jax.Array], jax.Array]
    devices: int

    def inner(self, rows: jax.Array, sizes: jax.Array, weights: Sequence[Any]) -> list[jax.Array]:
        """Return gate and up of each row, [rows, mlp] each: [rows, embed] -> what the other methods take."""
        found = [self.products.product(rows, each, sizes) for each in weights[:2]]
        biases = [of_groups(each, sizes, rows.shape[0]) for each in weights[3:5]]
        return [one + bias for one, bias in zip(found, biases, strict=True)] if biases else found

    def outer(self, inner: Sequence[jax.Array], factors: jax.Array, sizes: jax.Array, weights: Sequence[Any]):
        """Return the output of each row, [rows, embed]; `factors`: [rows, 1]."""
        out = self.products.product(self.gated(*inner) * factors, weights[2], sizes, transposed=True)
        return out + self._shares(weights, sizes, out.shape[0]) * factors if weights[3:] else out

    def backward(
        self,
        rows: jax.Array,
        by_rows: jax.Array,
        inner: Sequence[jax.Array],
        factors: jax.Array,
        sizes: jax.Array,
        weights: Sequence[Any],
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Return the gradients by rows, by factors (float32 [rows]) and by weights; `by_rows`: those by the outputs."""
        product, (gate, up, down, *biases) = self.products.product, weights
        hidden, gated_gradients = jax.vjp(self.gated, *inner)
        by_hidden = product(by_rows, down, sizes)
        by_factors = (hidden.astype(jnp.float32) * by_hidden.astype(jnp.float32)).sum(-1)
        by_gate, by_up = gated_gradients(by_hidden * factors)
        by_x = self.products.sum_of_turned((by_gate, by_up), (gate, up), sizes)
        left_right = ((rows, by_gate), (rows, by_up), (by_rows, hidden * factors))
        gradients = [self.products.weight_gradients(*each, sizes) for each in left_right]
        if biases:
            shares = self._shares(weights, sizes, rows.shape[0]).astype(jnp.float32)
            by_factors = by_factors + (shares * by_rows.astype(jnp.float32)).sum(-1)
            gradients += [sums_of_groups(by, sizes) for by in (by_gate, by_up, by_rows * factors)]
        return by_x, by_factors, gradients

    def _shares(self, weights: Sequence[Any], sizes: jax.Array, rows: int) -> jax.Array:
        """Return the share of down's bias that a device adds to each row."""
        return of_groups(weights[5], sizes, rows) / self.devices
