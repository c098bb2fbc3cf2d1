"""The gated MLPs of groups, such as experts, on rows that are sorted by group.

    y[r] = factor[r] * (gated(x[r] . gate + its bias, x[r] . up + its bias) . down^T + its bias),  of the group of row r

The weights of a call are gate, up and down, [groups, embed, mlp] each. Their biases may follow: those of gate and up,
[groups, mlp], and that of down, [groups, embed]. Products of 8-bit numbers take `Integers` in place of the matrices.

Beside frozen weights, matrices may have adapters: x . matrix + scale * (x . A) . B. The factors are the last weights:
A [groups, inputs, rank] and B [groups, rank, outputs] of each adapted matrix. They alone have gradients then.
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
    - `adapted`: the numbers of the matrices that have adapters: 0 gate, 1 up, 2 down
    - `scale`: that of the adapters
    """

    products: GroupedProducts
    gated: Callable[[jax.Array, jax.Array], jax.Array]
    devices: int
    adapted: tuple[int, ...] = ()
    scale: float = 1.0

    def trained(self, weights: Sequence[Any]) -> Sequence[Any]:
        """Return the weights that have gradients."""
        return weights[-2 * len(self.adapted) :] if self.adapted else weights

    def inner(self, rows: jax.Array, sizes: jax.Array, weights: Sequence[Any]) -> list[jax.Array]:
        """Return gate and up of each row, [rows, mlp] each: [rows, embed] -> what the other methods take."""
        found = [self._product(number, rows, sizes, weights) for number in (0, 1)]
        biases = [of_groups(each, sizes, rows.shape[0]) for each in self._biases(weights)[:2]]
        return [one + bias for one, bias in zip(found, biases, strict=True)] if biases else found

    def outer(self, inner: Sequence[jax.Array], factors: jax.Array, sizes: jax.Array, weights: Sequence[Any]):
        """Return the output of each row, [rows, embed]; `factors`: [rows, 1]."""
        out = self._product(2, self.gated(*inner) * factors, sizes, weights)
        return out + self._shares(weights, sizes, out.shape[0]) * factors if self._biases(weights) else out

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
        (gate, up, down), biases = weights[:3], self._biases(weights)
        hidden, gated_gradients = jax.vjp(self.gated, *inner)
        by_hidden = self.products.product(by_rows, down, sizes)
        if 2 in self.adapted:
            by_hidden = by_hidden + self._by_adapter(2, by_rows, sizes, weights)
        by_factors = (hidden.astype(jnp.float32) * by_hidden.astype(jnp.float32)).sum(-1)
        by_gate, by_up = gated_gradients(by_hidden * factors)
        by_x = self.products.sum_of_turned((by_gate, by_up), (gate, up), sizes)
        if biases:
            shares = self._shares(weights, sizes, rows.shape[0]).astype(jnp.float32)
            by_factors = by_factors + (shares * by_rows.astype(jnp.float32)).sum(-1)
        if self.adapted:
            pairs = ((rows, by_gate), (rows, by_up), (hidden * factors, by_rows))
            for number in {0, 1} & {*self.adapted}:
                by_x = by_x + self._by_adapter(number, pairs[number][1], sizes, weights)
            found = [self._factor_gradients(number, *pairs[number], sizes, weights) for number in self.adapted]
            return by_x, by_factors, [each for pair in found for each in pair]
        left_right = ((rows, by_gate), (rows, by_up), (by_rows, hidden * factors))
        gradients = [self.products.weight_gradients(*each, sizes) for each in left_right]
        if biases:
            gradients += [sums_of_groups(by, sizes) for by in (by_gate, by_up, by_rows * factors)]
        return by_x, by_factors, gradients

    def _product(self, number: int, rows: jax.Array, sizes: jax.Array, weights: Sequence[Any]) -> jax.Array:
        """Return the product with a matrix, and its adapter's."""
        out = self.products.product(rows, weights[number], sizes, transposed=number == 2)
        if number not in self.adapted:
            return out
        a, b = self._factors(number, weights)
        return out + self.products.product(self.scale * self.products.product(rows, a, sizes), b, sizes)

    def _by_adapter(self, number: int, by_out: jax.Array, sizes: jax.Array, weights: Sequence[Any]) -> jax.Array:
        """Return the adapter's part of the gradient by the inputs of a matrix: scale * (by_out . B^T) . A^T."""
        a, b = self._factors(number, weights)
        narrow = self.scale * self.products.product(by_out, b, sizes, transposed=True)
        return self.products.product(narrow, a, sizes, transposed=True)

    def _factor_gradients(
        self, number: int, rows: jax.Array, by_out: jax.Array, sizes: jax.Array, weights: Sequence[Any]
    ) -> tuple[jax.Array, jax.Array]:
        """Return the gradients by A and B; one without `mlp` is an addend over the devices that split it."""
        a, b = self._factors(number, weights)
        by_narrow = self.scale * self.products.product(by_out, b, sizes, transposed=True)
        narrow = self.scale * self.products.product(rows, a, sizes)
        gradients = self.products.weight_gradients
        return gradients(rows, by_narrow, sizes), gradients(narrow, by_out, sizes)

    def _factors(self, number: int, weights: Sequence[Any]) -> Sequence[jax.Array]:
        place = 2 * self.adapted.index(number)
        return self.trained(weights)[place : place + 2]

    def _biases(self, weights: Sequence[Any]) -> Sequence[jax.Array]:
        return weights[3 : len(weights) - 2 * len(self.adapted)]

    def _shares(self, weights: Sequence[Any], sizes: jax.Array, rows: int) -> jax.Array:
        """Return the share of down's bias that a device adds to each row."""
        return of_groups(weights[5], sizes, rows) / self.devices
