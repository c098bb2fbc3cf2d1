"""Muon: updates of matrices made orthogonal, of each layer and expert by itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import NamedArray
from jax.typing import ArrayLike
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from gregale.axes.layout import EMBED, LORA_RANK, Layout, is_named
from gregale.axes.parameters import has_name, names_of_arrays, trainable
from gregale.errors import KeyedError
from gregale.model.parametrisation import Scaling
from gregale.optim.config import (
    BETAS,
    EPSILON,
    Groups,
    MatrixAxes,
    Optimizer,
    OptimizerConfig,
    check_match,
    matrix_axes,
)
from gregale.optim.moments import check_moments, kept_in
from gregale.settings import DECAY, Fixed, above, at_least, restated, setting, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz (Jordan, 2024)


class Form(NamedTuple):
    """How the matrices of a parameter lie in its array, and in its shards.

    - `order`: the axes of [*batch, *first side, *second side]; the first side is that of `embed`
    - `batch`, `first`: the numbers of batch axes, and of axes of the first side
    - `sides`: the sizes of both sides' axes
    - `split`: the places of the axes of [matrices, *sides] that the mesh splits, with their mesh axes
    """

    order: tuple[int, ...]
    batch: int
    first: int
    sides: tuple[int, ...]
    split: tuple[tuple[int, tuple[str, ...]], ...]

    @staticmethod
    def of(leaf: NamedArray | jax.Array, sides: MatrixAxes, layout: Layout | None) -> "Form":
        names: list[str | int] = [*leaf.axis_names] if isinstance(leaf, NamedArray) else [*range(leaf.ndim)]
        ordered = sorted(sides, key=lambda side: not {EMBED, LORA_RANK}.issuperset(side))
        first, second = ([names.index(axis) for axis in side] for side in ordered)
        batch = [axis for axis in range(len(names)) if axis not in first + second]
        shape, split = jax.tree.leaves(leaf)[0].shape, []
        if layout is not None and isinstance(leaf, NamedArray):
            splits = layout.splits(leaf.axes, layout.params)
            split = [(place, splits[axis]) for place, axis in enumerate(first + second, 1) if splits[axis]]
        sizes = tuple(shape[axis] for axis in first + second)
        return Form((*batch, *first, *second), len(batch), len(first), sizes, tuple(split))

    def stack(self, local: jax.Array) -> jax.Array:
        """Turn a shard into [matrices, *sides]."""
        ordered = local.transpose(self.order)
        return ordered.reshape(-1, *ordered.shape[self.batch :])

    def unstack(self, stack: jax.Array, local: jax.Array) -> jax.Array:
        """Turn [matrices, *sides] into the form of a shard."""
        shape = [local.shape[axis] for axis in self.order]
        return stack.reshape(shape).transpose([self.order.index(axis) for axis in range(local.ndim)])


def orthogonalise(
    leaves: Sequence[NamedArray | jax.Array],
    sides: Sequence[MatrixAxes],
    layout: Layout | None,
    iterations: int,
    epsilon: float,
) -> list[NamedArray | jax.Array]:
    """Return every matrix of every leaf with its singular values near 1 (Jordan, 2024), in the shapes of the leaves.

    With a `layout`, named arrays enter and leave as shards of `params`. Matrices of equal shape and split, of all
    parameters, are one stack. The devices divide it. An all-to-all over the mesh axes that split a matrix brings whole
    matrices to each device, which iterates alone. Another all-to-all returns the shards. Nothing crosses `replica`.
    Without this, the partitioner splits each product over all free axes, including `replica`.

    - `leaves`: [*batch, *inputs, *outputs] in any order of axes
    - `sides`: the axes of inputs and outputs of each; all others are batch axes
    - `layout`: the mesh and the mappings; None outside of a mesh
    """
    forms = [Form.of(*each, layout) for each in zip(leaves, sides, strict=True)]
    groups: dict[tuple, list[int]] = {}
    for number, (leaf, form) in enumerate(zip(leaves, forms, strict=True)):
        key = is_named(leaf), leaf.dtype, form.first, form.sides, form.split
        groups.setdefault(key, []).append(number)
    found = [*leaves]
    for numbers in groups.values():
        arrays = [jax.tree.leaves(leaves[number])[0] for number in numbers]
        run = partial(_orthogonal, [forms[number] for number in numbers], iterations, epsilon)
        named = [leaf for leaf in (leaves[number] for number in numbers) if isinstance(leaf, NamedArray)]
        if layout is not None and named:
            specs = tuple(layout.spec(leaf.axes, layout.params) for leaf in named)
            run = layout.shard_map(run, specs, specs)
        for number, array in zip(numbers, run(*arrays), strict=True):
            found[number] = jax.tree.map(lambda _, array=array: array, leaves[number])
    return found


def _orthogonal(forms: Sequence[Form], iterations: int, epsilon: float, *shards: jax.Array) -> tuple[jax.Array, ...]:
    """Compute `orthogonalise` of the shards of a group, whose forms differ in nothing but the order of axes."""
    stacks = [form.stack(local) for form, local in zip(forms, shards, strict=True)]
    first, split = forms[0].first, forms[0].split
    # XLA would make the concatenation the operands of the all-to-all, and refuse them for their different layouts.
    together = jax.lax.optimization_barrier(jnp.concatenate(stacks)) if len(stacks) > 1 else stacks[0]
    whole = _bring_together(together, split)
    flat = whole.reshape(whole.shape[0], prod(whole.shape[1 : 1 + first]), -1)
    done = _newton_schulz(flat, iterations, epsilon).reshape(whole.shape)
    ends = np.cumsum([len(stack) for stack in stacks])
    back = jnp.split(_spread_again(done, split)[: ends[-1]], ends[:-1])
    return tuple(form.unstack(*each) for form, each in zip(forms, zip(back, shards, strict=True), strict=True))


def _bring_together(stack: jax.Array, split: Sequence) -> jax.Array:
    """Turn [matrices, *sides in shards] into [matrices / devices, *whole sides]; zero matrices fill up the last."""
    devices = prod(jax.lax.axis_size(axes) for _, axes in split)
    stack = jnp.pad(stack, [(0, -stack.shape[0] % devices)] + [(0, 0)] * (stack.ndim - 1))
    for axis, mesh_axes in split:
        stack = jax.lax.all_to_all(stack, mesh_axes, split_axis=0, concat_axis=axis, tiled=True)
    return stack


def _spread_again(stack: jax.Array, split: Sequence) -> jax.Array:
    """Invert `_bring_together`, except that zero matrices stay."""
    for axis, mesh_axes in reversed(split):
        stack = jax.lax.all_to_all(stack, mesh_axes, split_axis=axis, concat_axis=0, tiled=True)
    return stack


def _newton_schulz(stack: jax.Array, iterations: int, epsilon: float) -> jax.Array:
    """Iterate on [matrices, inputs, outputs]: without momentum, optax's transformation is only the iteration.

    Coefficients for each iteration make it a loop. With one set of them it is unrolled, and the compiler keeps the
    products of all iterations, and of all parameters, at the same time.
    """
    transformation = scale_by_muon(
        ns_coeffs=(COEFFICIENTS,) * iterations,
        ns_steps=iterations,
        beta=0.0,
        nesterov=False,
        eps=epsilon,
        weight_dimension_numbers=MuonDimensionNumbers(1, 2),
    )
    return jnp.asarray(transformation.update(stack, transformation.init(stack))[0])


MUON, ADAMW = "muon", "adamw"


@OptimizerConfig.register_subclass("muon")
@dataclass(frozen=True)
class MuonConfig(OptimizerConfig):
    """Muon for matrices, AdamW for the rest, and for `adamw` (Jordan, 2024; Liu et al., 2502.16982).

    `m = beta * m + (1 - beta) * g; direction = scale * orthogonal(m)`, with Newton-Schulz iterations over each layer's
    matrix. On shards, every iteration would send matrix products over `replica`. So the momentum is `sharded`, the rest
    is `gathered`, and Muon sends the same bytes over `replica` as AdamW.

    With `qk_clip`, after a step whose largest attention logit S of a group of heads is above it, the weights of queries
    and keys of that group are multiplied by `sqrt(qk_clip / S)` (QK-clip, Kimi K2, 2507.20534).

    With `heads`, each head's part of query, key, value and output is a matrix, so that no head gets an update for the
    sake of another's large gradient.

    `scale` is `rms * sqrt(max(inputs, outputs))`, which gives updates the size of AdamW's, so that both share learning
    rate and weight decay; with `rms: null` it is `sqrt(max(1, outputs / inputs))`.
    """

    scales_rates: ClassVar[bool] = True
    needs_whole_matrices: ClassVar[bool] = True

    weight_decay: float = restated(OptimizerConfig, "weight_decay", 0.1)
    momentum: float = setting(0.95, "decay of Muon's momentum", range=DECAY)
    nesterov: bool = setting(True, "look one step ahead along the momentum (AdamW's too)")
    iterations: int = setting(5, "Newton-Schulz iterations", range=whole(1, 100), aliases=("ns_steps",))
    rms: float | None = setting(0.2, "size of an update's elements; null: scale by shape instead", range=above(0))
    heads: bool = setting(
        False, "each head of attention is a matrix of its own; else those of a layer are one", by_topic=True
    )
    qk_clip: float | None = setting(
        None,
        "largest attention logit, above which a head's query and key weights shrink after a step (100 in Kimi K2)",
        range=above(0),
        by_topic=True,
    )
    adamw_learning_rate: float | None = setting(None, "AdamW's peak; null: Muon's", range=at_least(0))
    adamw: str | None = setting(
        None,
        "names of matrices for AdamW: `*` any characters, `|` between alternatives; null: none",
        fixed=Fixed("AdamW keeps two moments of a parameter, Muon one"),
    )
    betas: tuple[float, float] = setting((0.9, 0.95), "decays of AdamW's two moments", **BETAS)
    epsilon: float = setting(1e-8, "added to norms and AdamW's denominators", **EPSILON)

    def __post_init__(self):
        super().__post_init__()
        if self.clip_update_norm is not None:
            reason = ", and the norm of Muon's directions follows from shapes alone. Leave it out."
            raise KeyedError("clip_update_norm", f"is {self.clip_update_norm:g}", reason)

    def build(
        self, parameters, steps: int, layout: Layout | None = None, scalings: Sequence[Scaling] = ()
    ) -> Optimizer:
        trained = trainable(parameters)
        check_moments(self.moments, trained, layout)
        arrays = names_of_arrays(trained)
        if self.adamw is not None:
            check_match("adamw", self.adamw, [name for leaf, own in arrays if matrix_axes(leaf) for name in own])
        parts = [ADAMW if self._sides(*each) is None else MUON for each in arrays]
        labels = jax.tree.structure(trained, is_leaf=is_named).unflatten(parts)
        schedule, others = self.build_schedule(self.learning_rate, steps), self.grouped(parameters, scalings)
        matrices = self._of_matrices(others)
        adamw = optax.chain(
            kept_in(self.moments, optax.scale_by_adam(*self.betas, eps=self.epsilon, nesterov=self.nesterov)),
            self.add_decay(parameters, others),
            optax.scale_by_learning_rate(self.build_schedule(self._adamw_peak, steps)),
            others.rates(parameters),
        )
        orthogonal = optax.stateless(lambda updates, _: self.orthogonal(updates, layout))
        decay, rate = self.add_decay(parameters, matrices), optax.scale_by_learning_rate(schedule)
        muon = optax.chain(orthogonal, decay, rate, matrices.rates(parameters))
        momentum = kept_in(self.moments, scale_by_momentum(self.momentum, self.nesterov))
        return Optimizer(
            sharded=optax.chain(
                self.clip(),
                *([others.sizes(parameters)] if scalings else []),
                _partition(labels, {MUON: momentum, ADAMW: adamw}),
            ),
            gathered=_partition(labels, {MUON: muon, ADAMW: optax.identity()}),
            learning_rate=schedule,
        )

    def rule_of(self, leaf, names: Sequence[str], groups: Groups) -> tuple[str, float, Groups]:
        if self._sides(leaf, names) is None:
            return ADAMW, self._adamw_peak, groups
        return MUON, self.learning_rate, self._of_matrices(groups)

    def _sides(self, leaf, names: Sequence[str]) -> MatrixAxes | None:
        """Return the sides of a parameter that Muon changes; None for one of AdamW."""
        given = [name for name in names if self.adamw is not None and has_name(self.adamw, name)]
        if 0 < len(given) < len(names):
            reason = f", which has {given[0]}, and not the same array of all layers. Give them in full, with `layer.*`."
            raise KeyedError("adamw", f"is {self.adamw!r}", reason)
        return None if given else matrix_axes(leaf, self.heads)

    @property
    def _adamw_peak(self) -> float:
        return self.learning_rate if self.adamw_learning_rate is None else self.adamw_learning_rate

    def _of_matrices(self, groups: Groups) -> Groups:
        return replace(groups, rate="spectral" if self.rms is None else "rms")

    def orthogonal(self, updates, layout: Layout | None):
        """Return `scale * orthogonal(leaf)` for every matrix of the stacks of a tree."""
        leaves, structure = jax.tree.flatten(trainable(updates), is_leaf=is_named)
        every = [matrix_axes(leaf, self.heads) for leaf in leaves]
        sides = [each for each in every if each is not None]  # only matrices are labelled for Muon
        found = orthogonalise(leaves, sides, layout, self.iterations, self.epsilon)
        scales = [self._scale(*each) for each in zip(leaves, sides, strict=True)]
        return structure.unflatten(
            jax.tree.map(partial(jnp.multiply, scale), leaf) for scale, leaf in zip(scales, found, strict=True)
        )

    def _scale(self, leaf: NamedArray | jax.Array, sides: MatrixAxes) -> float:
        names = leaf.axis_names if isinstance(leaf, NamedArray) else range(leaf.ndim)
        sizes = dict(zip(names, jax.tree.leaves(leaf)[0].shape, strict=True))
        fan_in, fan_out = (prod(sizes[axis] for axis in side) for side in sides)
        return max(1, fan_out / fan_in) ** 0.5 if self.rms is None else self.rms * max(fan_in, fan_out) ** 0.5


def _partition(labels, transformations) -> optax.GradientTransformationExtraArgs:
    # optax calls the tree of labels if it is a module with a `__call__`.
    return optax.partition(transformations, lambda _: labels)


class MomentumState(NamedTuple):
    count: ArrayLike  # steps taken
    momentum: optax.Updates  # shapes and axes of the parameters


def scale_by_momentum(beta: float, nesterov: bool) -> optax.GradientTransformation:
    """Return the moving average `m = beta * m + (1 - beta) * g`, corrected for its start at zero.

    With `nesterov` the result is `beta * m / (1 - beta^(t + 1)) + (1 - beta) * g / (1 - beta^t)`, t counted from 1
    (Dozat, 2016): the momentum inside optax's Muon.
    """

    def init(params):
        return MomentumState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(updates, state, params=None):
        momentum = optax.tree.update_moment(updates, state.momentum, beta, 1)
        count = optax.safe_increment(state.count)
        if nesterov:
            ahead = optax.tree.bias_correction(momentum, beta, optax.safe_increment(count))
            now = optax.tree.bias_correction(updates, beta, count)
            direction = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        else:
            direction = optax.tree.bias_correction(momentum, beta, count)
        return direction, MomentumState(count, momentum)

    return optax.GradientTransformation(init, update)
