"""The arrays of a model: parameters, buffers, frozen weights and stacks of layers, and what their shapes decide.

A structure is a set of arrays with their shapes: an MLP of another width, or attention of another kind, is another
structure. The first stack has the axis `layers`, further ones have `layers_1`, `layers_2` and so on. All of them lie
where `layers` lies.

A sequence is cut into 2n chunks for n devices. Device i holds the chunks i and 2n - 1 - i, so that under a causal mask
all devices have equal work. Tokens, targets, positions, segments and masks are all in this order.
"""

import re
from collections.abc import Sequence
from fnmatch import translate
from functools import cache
from typing import Any, NamedTuple, Protocol, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from gregale.axes.layout import LAYERS, Layout, is_layers, is_named
from gregale.errors import UserError


class Stacks(eqx.Module):
    """Holds the layers of a model with several structures, a stack for each.

    - `parts`: of structure s, a tree of arrays with the axis `stack_axis(s)`
    - `order`: the structure of each layer, in the order of the computation
    """

    parts: list[Any]
    order: tuple[int, ...] = eqx.field(static=True)

    def __check_init__(self):
        if set(self.order) != {*range(len(self.parts))}:
            raise UserError(
                f"Stacks: order is {self.order}, and there are {len(self.parts)} stacks: it needs each of 0 to "
                f"{len(self.parts) - 1}, and no other."
            )


def stack_axis(structure: int) -> str:
    """Return the name of the axis of a structure's layers."""
    return f"{LAYERS}_{structure}" if structure else LAYERS


def layers_axis(leaf: Any) -> str | None:
    """Return the name of an array's axis of layers; None if it has none, or is not named."""
    return next(filter(is_layers, leaf.axis_names), None) if is_named(leaf) else None


def is_stacks(node: Any) -> bool:
    return isinstance(node, Stacks)


def layer_order(model: Any) -> tuple[int, ...]:
    """Return the structure of each layer of a model, or of its parameters; empty without stacked layers."""
    if found := next(filter(is_stacks, jax.tree.leaves(model, is_leaf=is_stacks)), None):
        return found.order
    leaves = jax.tree.leaves(model, is_leaf=is_named)
    return next(((0,) * leaf.resolve_axis(LAYERS).size for leaf in leaves if layers_axis(leaf)), ())


def layer_numbers(order: Sequence[int]) -> dict[str, list[int]]:
    """Return, for the axis of each stack, the numbers of its layers in the whole model."""
    return {stack_axis(each): np.flatnonzero(np.asarray(order) == each).tolist() for each in dict.fromkeys(order)}


def names_of_arrays(tree: Any) -> list[tuple[Any, list[str]]]:
    """Return each array of a model with its name, `norm.weight`, or one for each layer, `layer.3.mlp.up.weight`."""
    numbers = layer_numbers(layer_order(tree))

    def names(path: tuple, leaf: Any) -> list[str]:
        words = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if (axis := layers_axis(leaf)) is None:
            return [".".join(words)]
        inside = words[3 if words[1:2] == ["parts"] else 1 :]
        return [".".join(["layer", str(layer), *inside]) for layer in numbers[axis]]

    return [(leaf, names(path, leaf)) for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)[0]]


def has_name(match: str, name: str) -> bool:
    """Return whether a pattern has a name: `*` stands for any characters, `|` separates alternatives."""
    return _pattern(match).fullmatch(name) is not None


@cache
def _pattern(match: str) -> re.Pattern:
    return re.compile("|".join(f"(?:{translate(each.strip())})" for each in match.split("|")))


def renamed(tree: Any, old: str, new: str) -> Any:
    """Return a tree whose named arrays have another name for an axis."""
    if old == new:
        return tree

    def one(leaf):
        names = [new if name == old else name for name in leaf.axis_names] if is_named(leaf) else ()
        return NamedArray(leaf.array, tuple(names)) if is_named(leaf) else leaf

    return jax.tree.map(one, tree, is_leaf=is_named)


def in_layer_order(tree: Any) -> Any:
    """Return arrays of all layers with the axis `layers`; those of `Stacks` need equal shapes."""
    if not is_stacks(tree):
        return tree
    numbers = [each for own in layer_numbers(tree.order).values() for each in own]
    structures = dict.fromkeys(tree.order)
    parts = [renamed(tree.parts[each], stack_axis(each), LAYERS) for each in structures]
    order = np.argsort(numbers)

    def one(*own: NamedArray) -> NamedArray:
        place = own[0].axis_names.index(LAYERS)
        return NamedArray(jnp.concatenate([each.array for each in own], place).take(order, place), own[0].axis_names)

    return jax.tree.map(one, *parts, is_leaf=is_named)


INTEGER, FLOAT32 = 4, 4  # bytes
MOST_BLOCKS = 4  # of a group, if its memory adds to that of the table: `compute.loss_block` limits both
ALIGNED = 64  # tokens of a block are a multiple of it, or of a 16th of `compute.loss_block` if that is less


def exchanges_rows(tokens: int, embed: int, vocabulary: int, width: int, devices: int) -> bool:
    """Return whether a lookup sends rows to their tokens, and gradients back to rows, instead of gathering the table.

    Each of `devices` devices has some columns of the table. In the first form it gathers the other columns, vocabulary
    * embed values, and sums the gradient of the whole table on the way back. In the second form it gathers the ids of
    the other devices and looks up its columns of all their tokens. An all-to-all of tokens * embed values completes the
    rows; another returns the gradients to the columns. A device sends the same share of each payload, so payloads are
    compared.

    - `tokens`: on a device, in a microbatch
    - `vocabulary`: rows of the table on a device
    - `width`: bytes of a value of the compute dtype
    """
    return devices > 1 and tokens * (embed * width + devices * INTEGER) < vocabulary * embed * width


class LossBlocks(NamedTuple):
    """The division of a device's tokens for the loss: groups of blocks of tokens, padded at the end.

    - `block`: tokens whose logits are computed at a time
    - `blocks`: blocks of a group; the gradients by logits of all its tokens are in memory, in the compute dtype
    """

    groups: int
    blocks: int
    block: int

    @property
    def group(self) -> int:
        """Return the tokens of a group."""
        return self.blocks * self.block

    @property
    def tokens(self) -> int:
        """Return the number of tokens, padding included."""
        return self.groups * self.group


def loss_blocks(tokens: int, embed: int, width: int, block: int, fused: bool = False) -> LossBlocks:
    """Return the groups and blocks of the loss.

    The gradient by head is one product for each group. Several groups are summed in a float32 table [embed,
    vocabulary], which each group reads and writes once; a single group needs no table. So all tokens are one group if
    their gradients by logits take no more memory than the table. Otherwise a group takes at most half of it, with 1 to
    `MOST_BLOCKS` blocks; if logits are never in memory in float32, it is one block, and takes the memory of a block's.
    Blocks have equal sizes that are multiples of at most `ALIGNED`, so padding is less than an eighth of the tokens.

    - `tokens`: on a device, in a microbatch
    - `width`: bytes of a value of the compute dtype
    - `block`: the most tokens whose logits are in memory in float32
    - `fused`: a group's exponentials are computed with their product, see `gregale.model.execution.Execution`
    """
    block = min(block, tokens)
    aligned = max(1, min(ALIGNED, block // 16))
    instead_of_table, most = embed * FLOAT32 // width, FLOAT32 // width if fused else MOST_BLOCKS
    limit = tokens if tokens <= instead_of_table else max(block, min(instead_of_table // 2, most * block))
    if fused:
        block = limit
    groups = 1 if limit == tokens else _ceil(tokens, limit // block * block)
    blocks = _ceil(tokens, groups * block)
    return LossBlocks(groups, blocks, min(block, aligned * _ceil(tokens, groups * blocks * aligned)))


def _ceil(count: int, parts: int) -> int:
    return -(-count // parts)


def chunk_order(devices: int) -> np.ndarray:
    """Return the chunks of all devices, device by device: integers [2 * devices], as 0 3 1 2 for two devices."""
    first = np.arange(devices)
    return np.stack([first, 2 * devices - 1 - first], axis=1).reshape(-1)


def position_order(length: int, devices: int) -> np.ndarray:
    """Return the positions of a sequence as the devices hold them, integers [length]; in their order on one device."""
    if devices == 1:
        return np.arange(length)
    return np.arange(length).reshape(2 * devices, -1)[chunk_order(devices)].reshape(-1)


def chunks_reached(chunk: int, devices: int, window: int | None) -> int | None:
    """Return how many chunks before its own a query's window reaches; None: keys of all chunks are gathered.

    Each device sends 2 `reach` chunks to its neighbours, or 2 (n - 1) in a gather: the form that sends less is taken.

    - `chunk`: c, positions of a chunk
    - `window`: w, the keys that a query sees at most: it reaches (w - 1) / c chunks; None: all before it
    """
    if window is None:
        return None
    reach = -(-(window - 1) // chunk)
    return reach if reach < devices - 1 else None


SHARE = 1.5  # rows of a round to a device, over an even share
MULTIPLE = 8  # of these rows


def rows_to_a_device(pairs: int, devices: int) -> int:
    """Return the rows that a device sends to each of `devices` devices in a round.

    - `pairs`: the (token, expert) pairs of a microbatch on a device
    """
    even = -(-int(SHARE * pairs) // devices)
    return min(-(-even // MULTIPLE) * MULTIPLE, pairs)


IN_BLOCK = "in_block"


class Blocks(Protocol):
    """A block codec (`gregale.codecs.codec.BlockCodec`)."""

    @property
    def block(self) -> int: ...

    def quantise(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]: ...

    def pack(self, codes: jax.Array) -> jax.Array: ...

    def unpack(self, packed: jax.Array, axis: int) -> jax.Array: ...

    def values(self, codes: jax.Array) -> jax.Array: ...


class QuantisedWeight(eqx.Module):
    """A weight in codes, with a scale for each block of values along one of its axes, `along`.

    In both arrays `along` counts blocks, and the codes of a block are on the axis behind it. So each mapping splits the
    weight by whole blocks.

    - `dtype`: of the weight that was quantised
    """

    codes: NamedArray  # uint8 [..., along, in_block, ...]
    scales: NamedArray  # bfloat16 [..., along, ...]
    codec: Blocks = eqx.field(static=True)
    along: str = eqx.field(static=True)
    dtype: jnp.dtype = eqx.field(static=True)

    @classmethod
    def of(cls, weight: NamedArray, codec: Blocks, along: str) -> Self:
        """Return the quantised form of a weight, computed for one index of its first axis at a time."""
        place = weight.axis_names.index(along)

        def one(array: jax.Array) -> tuple[jax.Array, jax.Array]:
            last = jnp.moveaxis(array.astype(jnp.float32), place - 1, -1)
            codes, scales = codec.quantise(last.reshape(*last.shape[:-1], -1, codec.block))
            packed = jnp.moveaxis(codec.pack(codes), (-2, -1), (place - 1, place))
            return packed, jnp.moveaxis(scales, -1, place - 1).astype(jnp.bfloat16)

        codes, scales = jax.lax.map(one, weight.array)
        names = weight.axis_names
        behind = (*names[: place + 1], IN_BLOCK, *names[place + 1 :])
        return cls(NamedArray(codes, behind), NamedArray(scales, names), codec, along, jnp.dtype(weight.dtype))

    @property
    def axes(self) -> tuple[Axis, ...]:
        counted = self.scales.resolve_axis(self.along)
        whole = Axis(self.along, counted.size * self.codec.block)
        return tuple(whole if axis == counted else axis for axis in self.scales.axes)

    @property
    def size(self) -> int:
        """Return the number of values."""
        return self.scales.size * self.codec.block

    def requantised(self, weight: NamedArray) -> Self:
        """Return another weight in the same form."""
        return self.of(weight.astype(self.dtype), self.codec, self.along)

    def decoded(self, dtype: jnp.dtype) -> NamedArray:
        """Return the weight: the product of value and scale in float32, rounded to `dtype`."""
        place = self.scales.axis_names.index(self.along)
        values = self.codec.values(self.codec.unpack(self.codes.array, place + 1))
        scaled = values * jnp.expand_dims(self.scales.array.astype(jnp.float32), place + 1)
        shape = tuple(axis.size for axis in self.axes)
        return NamedArray(scaled.astype(dtype).reshape(shape), self.scales.axis_names)

    def check_blocks(self, layout: Layout) -> None:
        """Raise `UserError` if devices would hold parts of blocks."""
        (over,) = layout.splits((self.along,), layout.params)
        blocks, devices = self.scales.resolve_axis(self.along).size, layout.devices((self.along,), layout.params)
        if blocks % devices:
            block = self.codec.block
            split = " x ".join(f"{name} {layout.mesh.shape[name]}" for name in over if layout.mesh.shape[name] > 1)
            raise UserError(
                f"adapter.base holds weights in blocks of {block} values: a projection has {blocks * block} of them "
                f"along {self.along}, which are {blocks} blocks. They would be split over {split} = {devices} devices, "
                f"and {blocks} / {devices} = {blocks / devices:.4g} is not a whole number. Use fewer devices along "
                "these axes, or adapter.base dtype."
            )

    def all_gathered(self, layout: Layout) -> Self:
        """Return the weight under `compute`; codes and scales are gathered."""
        held = layout.constrain((self.codes, self.scales), layout.params)
        codes, scales = layout.constrain(held, layout.compute)
        return type(self)(codes, scales, self.codec, self.along, self.dtype)


def is_quantised(node: Any) -> bool:
    return isinstance(node, QuantisedWeight)


def decoded(tree: Any, dtype: jnp.dtype) -> Any:
    """Return a tree with arrays in place of its quantised weights."""
    return jax.tree.map(lambda leaf: leaf.decoded(dtype) if is_quantised(leaf) else leaf, tree, is_leaf=is_quantised)


class Buffer(eqx.Module):
    """Marks an array of a model as state that gradients do not train: a running mean, a router's bias.

    The model's `update_buffers` computes it once a step. It keeps its own dtype, and lies under `compute` at all times.
    """

    value: NamedArray


class Frozen(eqx.Module):
    """Marks a weight that nothing trains, in the model of a method; models that compute have its value in its place.

    It lies under `params`. The value of an abstract model has a shape alone; `holding` gives it the weights.
    """

    value: NamedArray | jax.Array


def is_buffer(leaf) -> bool:
    return isinstance(leaf, Buffer)


def is_frozen(leaf) -> bool:
    return isinstance(leaf, Frozen)


def is_parameter(leaf) -> bool:
    """Return whether a leaf is trained: an array of floating-point numbers, or its abstract form; no mark."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def trainable(model: Any) -> Any:
    """Return a model, or an abstract one, with its parameters alone; None in place of other leaves."""
    return eqx.filter(model, is_parameter, is_leaf=lambda leaf: is_buffer(leaf) or is_frozen(leaf))


def static_of(model: Any) -> Any:
    """Return what `trainable` leaves out of a model, with frozen weights in place of their marks; None if abstract."""

    def value(leaf):
        held = is_frozen(leaf) and all(isinstance(each, jax.Array) for each in jax.tree.leaves(leaf))
        return leaf.value if held else None if is_frozen(leaf) else leaf

    return jax.tree.map(value, eqx.filter(model, is_parameter, inverse=True, is_leaf=is_frozen), is_leaf=is_frozen)


def buffers_of(model: Any) -> Any:
    """Return a model with its buffers alone, and None in place of other leaves; None if it has no buffer."""
    found = jax.tree.map(lambda leaf: leaf if is_buffer(leaf) else None, model, is_leaf=_is_whole)
    return found if jax.tree.leaves(found) else None


def frozen_of(model: Any) -> Any:
    """Return a model's frozen weights without their marks, and None in place of other leaves; None if it has none."""
    found = jax.tree.map(lambda leaf: leaf.value if is_frozen(leaf) else None, model, is_leaf=_is_whole)
    return found if jax.tree.leaves(found) else None


def holding(model: Any, frozen: Any) -> Any:
    """Return a model whose marks have the weights of `frozen_of`."""

    def held(leaf, value):
        return Frozen(value) if is_frozen(leaf) else leaf

    return model if frozen is None else jax.tree.map(held, model, frozen, is_leaf=_is_whole)


def with_arrays(model: Any, arrays: Any) -> Any:
    """Return a model, or its parameters alone, with the arrays of `buffers_of` or `frozen_of`."""
    if arrays is None:
        return model
    return jax.tree.map(lambda own, new: own if new is None else new, model, arrays, is_leaf=_is_whole)


def parameter_count(model) -> int:
    """Return the number of values in all parameters of a model; works on abstract ones."""
    return sum(leaf.size for leaf in jax.tree.leaves(trainable(model)))


def _is_whole(leaf) -> bool:
    return leaf is None or isinstance(leaf, Buffer | Frozen | NamedArray | QuantisedWeight)
