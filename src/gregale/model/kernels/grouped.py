"""Products of rows with the matrices of their groups: `rows` are sorted by group, and `sizes` says how many each has.

    product:           out[r] = rows[r] . weights[group(r)]
    weight gradients:  out[g] = sum over rows r of group g of rows[r]^T . cotangents[r]

No row is multiplied by the matrix of another group, so the FLOPs do not grow with the number of groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
    return jax.lax.fori_loop(0, blocks.used, add, out)[: rows.shape[0]]


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
    return jax.lax.fori_loop(0, blocks.used, add, out).astype(rows.dtype)


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
    sums = jnp.einsum("rg,rn->gn", held.astype(rows.dtype), kept, preferred_element_type=jnp.float32)
    return sums.astype(rows.dtype)


BLOCKED = GroupedProducts(product, weight_gradients)
