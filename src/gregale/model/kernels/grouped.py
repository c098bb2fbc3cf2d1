"""Products of rows with the matrices of their groups, such as experts, and the gated MLPs that these make up.

    product:           out[r] = rows[r] . weights[group(r)]
    weight gradients:  out[g] = sum over rows r of group g of rows[r]^T . cotangents[r]

No row is multiplied by the matrix of another group, so the FLOPs do not grow with the number of groups.

    y[r] = factor[r] * (gated(x[r] . gate + its bias, x[r] . up + its bias) . down^T + its bias),  of the group of row r

The weights of a call are gate, up and down, [groups, embed, mlp] each. Their biases may follow: those of gate and up,
[groups, mlp], and that of down, [groups, embed]. Products of 8-bit numbers take `Integers` in place of the matrices.

Beside frozen weights, matrices may have adapters: x . matrix + scale * (x . A) . B. The factors are the last weights:
A [groups, inputs, rank] and B [groups, rank, outputs] of each adapted matrix. They alone have gradients then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gregale.scopes import SUM, runs

LARGEST_BLOCK = 128
FUSED = 2048  # contracted values, all of which a kernel has in its memory


@dataclass(frozen=True)
class GroupedProducts:
    """One form of both products.

    - `product(rows, weights, sizes, transposed)`: [rows, a], [groups, a, b] (with `transposed` [groups, b, a]) ->
      [rows, b]. Rows after the last group give anything, also NaN
    - `weight_gradients(rows, cotangents, sizes)`: [rows, a], [rows, b] -> [groups, a, b], zeros for an empty group
    - `fused`: a kernel for `sum_of_turned` of at most `FUSED` contracted values; None: there is none
    """

    product: Callable[..., jax.Array]
    weight_gradients: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    fused: Callable[..., jax.Array] | None = None

    def sum_of_turned(self, rows: Sequence[jax.Array], weights: Sequence[Any], sizes: jax.Array) -> jax.Array:
        """Return the sum over i of rows[i] . weights[i]^T."""
        if self.fused is not None and rows[0].shape[1] <= FUSED:
            return self.fused(rows, weights, sizes)
        one, two = (self.product(*each, sizes, transposed=True) for each in zip(rows, weights, strict=True))
        return one + two


class Block(NamedTuple):
    """Rows that one product takes: those of one group."""

    group: jax.Array
    start: jax.Array
    rows: jax.Array  # fewer than a whole block at the end of a group


class Blocks(NamedTuple):
    """The blocks of all groups, in order: arrays of as many as there can be, of which `used` are."""

    used: jax.Array
    all: Block

    def __getitem__(self, index) -> Block:  # type: ignore[override]
        return Block(*(each[index] for each in self.all))


def block_size(rows: int, groups: int) -> int:
    """Return the rows of a block: about those of a group, because its last block is multiplied whole."""
    return min(LARGEST_BLOCK, max(8, 1 << (rows // groups).bit_length()))


def blocks_of(sizes: jax.Array, rows: int, block: int) -> Blocks:
    groups, most = sizes.shape[0], -(-rows // block) + sizes.shape[0]
    counts = -(-sizes // block)
    ends = jnp.cumsum(counts)
    number = jnp.arange(most)
    group = jnp.minimum(jnp.searchsorted(ends, number, side="right"), groups - 1)
    within = (number - (ends - counts)[group]) * block
    start = (jnp.cumsum(sizes) - sizes)[group] + within
    return Blocks(ends[-1], Block(group, start, jnp.minimum(sizes[group] - within, block)))


def product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, transposed: bool = False) -> jax.Array:
    """Multiply in a loop over blocks."""
    block = block_size(rows.shape[0], sizes.shape[0])
    blocks, filled = blocks_of(sizes, rows.shape[0], block), jnp.pad(rows, ((0, block), (0, 0)))

    def add(index, out):
        own = blocks[index]
        weight = jax.lax.dynamic_index_in_dim(weights, own.group, keepdims=False)
        left = jax.lax.dynamic_slice_in_dim(filled, own.start, block)
        found = jnp.dot(left, weight.T if transposed else weight, preferred_element_type=jnp.float32)
        # Rows of the next group, at the end of a block, are written again by its own.
        return jax.lax.dynamic_update_slice_in_dim(out, found.astype(out.dtype), own.start, 0)

    out = jnp.zeros((filled.shape[0], weights.shape[1 if transposed else 2]), rows.dtype)
    return _over(blocks, add, out, rows.shape[0] // block)[: rows.shape[0]]


def _over(blocks: Blocks, add: Callable[[Any, jax.Array], jax.Array], out: jax.Array, whole: int) -> jax.Array:
    """Run a function for each block. `whole`: the number of whole blocks, which readers of the program count."""
    with runs(max(1, whole)):
        return jax.lax.fori_loop(0, blocks.used, add, out)


def weight_gradients(rows: jax.Array, cotangents: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply in a loop over blocks, and add in float32."""
    block = block_size(rows.shape[0], sizes.shape[0])
    blocks = blocks_of(sizes, rows.shape[0], block)
    filled = [jnp.pad(each, ((0, block), (0, 0))) for each in (rows, cotangents)]

    def add(index, out):
        own = blocks[index]
        held = (jnp.arange(block) < own.rows)[:, None]
        left, right = (jnp.where(held, jax.lax.dynamic_slice_in_dim(each, own.start, block), 0) for each in filled)
        addend = jnp.dot(left.T, right, preferred_element_type=jnp.float32)
        before = jax.lax.dynamic_index_in_dim(out, own.group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(out, before + addend, own.group, 0)

    out = jnp.zeros((sizes.shape[0], rows.shape[1], cotangents.shape[1]), jnp.float32)
    return _over(blocks, add, out, rows.shape[0] // block).astype(rows.dtype)


def of_groups(values: jax.Array, sizes: jax.Array, rows: int) -> jax.Array:
    """Return the values of each row's group: [groups, n] -> [rows, n]; zeros for rows after the last group."""
    group = (jnp.arange(rows)[:, None] >= jnp.cumsum(sizes)).sum(-1)
    return values.at[group].get(mode="fill", fill_value=0, indices_are_sorted=True)


def sums_of_groups(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return the sum of each group's rows, in their dtype, added in float32: [rows, n] -> [groups, n].

    By a product, because accelerators are slow at scattered sums; rows after the last group may be NaN.
    """
    place, ends = jnp.arange(rows.shape[0])[:, None], jnp.cumsum(sizes)
    held = (place >= ends - sizes) & (place < ends)
    kept = jnp.where(place < ends[-1], rows, 0)
    with jax.named_scope(SUM):
        sums = jnp.einsum("rg,rn->gn", held.astype(rows.dtype), kept, preferred_element_type=jnp.float32)
    return sums.astype(rows.dtype)


BLOCKED = GroupedProducts(product, weight_gradients)


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
