"""The choice of an optimizer by `type`, its groups of parameters, and the clipping of gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import draccus
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import NamedArray

from gregale.axes.layout import EMBED, EXPERTS, LORA_RANK, Layout, Tree, is_layers, is_named
from gregale.axes.parameters import has_name, layers_axis, names_of_arrays, trainable
from gregale.errors import KeyedError, below
from gregale.model.parametrisation import Scaling
from gregale.optim.moments import MOMENTS, check_moments, kept_in
from gregale.optim.schedules import CosineSchedule, ScheduleConfig
from gregale.settings import DECAY, Fixed, Range, Settings, above, at_least, restated, setting, whole

SHOWN = 4  # names in a message


@dataclass(frozen=True)
class GroupConfig(Settings):
    """Parameters by the names that `inspect.granularity: array` shows, such as `layer.3.attention.query.weight`."""

    match: str = setting("*", "names: `*` any characters, `|` between alternatives", by_topic=True)
    learning_rate: float = setting(1.0, "factor of the learning rate", range=at_least(0), by_topic=True)
    weight_decay: float | None = setting(
        None, "in place of the optimizer's; null: the same", range=at_least(0), by_topic=True
    )

    def has(self, name: str) -> bool:
        return has_name(self.match, name)


class ParameterRule(NamedTuple):
    """How an optimizer changes a parameter; `rate` is the peak."""

    algorithm: str
    rate: float
    weight_decay: float


@dataclass(frozen=True)
class Groups:
    """The groups of an optimizer, and the scalings of its model. Of several that have a parameter the first counts.

    Factors of groups and of scalings multiply. A scaling changes the rate and not the product of rate and decay.

    - `rate`: the field of `Scaling` for the rate of this optimizer
    """

    groups: Sequence[GroupConfig]
    scalings: Sequence[Scaling] = ()
    rate: str = "elements"

    def __bool__(self) -> bool:
        return bool(self.groups or self.scalings)

    def check(self, parameters: Any) -> None:
        """Raise `KeyedError` for a group without parameters."""
        names = [name for _, own in names_of_arrays(trainable(parameters)) for name in own]
        for number, group in enumerate(self.groups):
            check_match(f"groups.{number}.match", group.match, names)

    def rates(self, parameters: Any) -> optax.GradientTransformation:
        """Return the factors of the learning rate, for updates; without groups nothing."""
        if not self:
            return optax.identity()
        return _scaling(self._values(parameters, self.rate_of))

    def sizes(self, parameters: Any) -> optax.GradientTransformation:
        """Return what gives gradients the size of the base model's, so that epsilon has the same weight."""
        return _scaling(self._values(parameters, lambda leaf, name: 1 / self._scaled(name, "gradient")))

    def rate_of(self, leaf: Any, name: str) -> float:
        """Return the factor of a parameter's learning rate."""
        return self._own(name, lambda group: group.learning_rate, 1.0) * self._scaled(name, self.rate)

    def decay_of(self, leaf: Any, name: str, others: Callable[[Any], float]) -> float:
        """Return a parameter's weight decay; `others`: as for `decay`."""
        return self._own(name, lambda group: group.weight_decay, others(leaf)) / self._scaled(name, self.rate)

    def decay(self, parameters: Any, others: Callable[[Any], float]) -> optax.GradientTransformation:
        """Return the weight decay; `others`: leaf -> that of a parameter whose group has none."""
        decays = self._values(parameters, lambda leaf, name: self.decay_of(leaf, name, others))

        def one(values: "_Values", update, parameter):
            return update if _is_masked(update) else _added(update, _times(values, parameter))

        return optax.stateless(lambda updates, given: jax.tree.map(one, decays, updates, given))

    def _own(self, name: str, of: Callable[[GroupConfig], float | None], otherwise: float) -> float:
        found = next((of(group) for group in self.groups if group.has(name)), None)
        return otherwise if found is None else found

    def _scaled(self, name: str, factor: str) -> float:
        return next((getattr(each, factor) for each in self.scalings if has_name(each.match, name)), 1.0)

    def _values(self, parameters: Any, value: Callable[[Any, str], float]) -> Any:
        """Return a tree with the values of every parameter."""
        arrays = names_of_arrays(trainable(parameters))
        found = [_Values(tuple(value(leaf, name) for name in names), layers_axis(leaf)) for leaf, names in arrays]
        return jax.tree.structure(trainable(parameters), is_leaf=is_named).unflatten(found)


def check_match(key: str, match: str, names: Sequence[str]) -> None:
    if not any(has_name(match, name) for name in names):
        shown = ", ".join(names[:: max(1, len(names) // SHOWN)][:SHOWN])
        reason = f", and no parameter has such a name. Some of the {len(names)} names: {shown}."
        raise KeyedError(key, f"is {match!r}", reason)


@dataclass(frozen=True)
class _Values:
    """A number for a parameter, or one for each of its layers."""

    values: tuple[float, ...]
    layers: str | None


def _scaling(factors: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, _: jax.tree.map(_times, factors, updates))


def _is_masked(leaf) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def _times(by: _Values, leaf):
    """Multiply an array, if it is not masked."""
    if _is_masked(leaf) or set(by.values) == {1.0}:
        return leaf
    if len(set(by.values)) == 1:
        return jax.tree.map(lambda array: array * jnp.asarray(by.values[0], array.dtype), leaf)
    assert by.layers is not None, "only rows along layers have several names"
    return leaf * NamedArray(jnp.asarray(np.asarray(by.values), leaf.dtype), (by.layers,))


def _added(update, addend):
    return jax.tree.map(jnp.add, update, addend.rearrange(update.axes) if is_named(update) else addend)


def global_norm(tree) -> jax.Array:
    """Return the L2 norm over all elements of all arrays of a tree, summed in float32: a float32 scalar."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def clip_by_norm(limit: float, of_gradients: bool = True) -> optax.GradientTransformationExtraArgs:
    """Scale updates by `limit / max(norm, limit)` (Pascanu et al., 1211.5063).

    A caller that has the norm of the gradients already (to report it) passes `gradient_norm=` to `update`, so that it
    is taken once.

    - `of_gradients`: the updates are the gradients
    """

    def update(updates, state, params=None, *, gradient_norm=None, **_):
        norm = gradient_norm if of_gradients and gradient_norm is not None else global_norm(updates)
        factor = limit / jnp.maximum(norm, limit)
        return jax.tree.map(lambda update: update * factor.astype(update.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


VOCAB = "vocab"
HEADS = ("heads", "kv_heads")


class MatrixAxes(NamedTuple):
    """The two sides of a matrix: names of axes (positions, for an array without names). All others are batch axes."""

    inputs: tuple[str | int, ...]
    outputs: tuple[str | int, ...]


def matrix_axes(leaf: NamedArray | jax.Array, heads: bool = False) -> MatrixAxes | None:
    """Return the sides of a parameter, or None if it is not a matrix: norm scales, biases, embeddings, output heads.

    With names: `embed` is one side, all axes but `layers` are the other, and the side that comes first is the input:
    `[layers, embed, mlp]` maps embed to mlp, `[layers, heads, head_size, embed]` maps (heads, head_size) to embed. Each
    expert is a matrix: `[layers, experts, embed, mlp]` has a batch axis `experts`. In adapters `lora_rank` is that
    side. An array with a `vocab` axis, and one without such a side (an attention bias `[layers, heads, head_size]`), is
    not a matrix. Without names: an array with exactly two axes.

    - `heads`: each head is a matrix: heads are a batch axis too
    """
    if not isinstance(leaf, NamedArray):
        return MatrixAxes((0,), (1,)) if leaf.ndim == 2 else None
    batch = (EXPERTS, *HEADS) if heads else (EXPERTS,)
    names = [name for name in leaf.axis_names if not is_layers(name) and name not in batch]
    side = LORA_RANK if LORA_RANK in names else EMBED
    others = tuple(name for name in names if name != side)
    if side not in names or not others or VOCAB in names:
        return None
    return MatrixAxes((side,), others) if names[0] == side else MatrixAxes(others, (side,))


def decays(leaf: NamedArray | jax.Array) -> bool:
    """Return whether weight decay applies to this parameter: matrices, embeddings and heads; not scales and biases."""
    if matrix_axes(leaf) is not None:
        return True
    if not isinstance(leaf, NamedArray):
        return leaf.ndim > 1
    return {VOCAB, EMBED} <= set(leaf.axis_names)


def map_parameters(function, parameters):
    """Return a tree with `function(leaf)` for every parameter, named or plain; None for untrained leaves."""
    return jax.tree.map(function, trainable(parameters), is_leaf=is_named)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer in two parts, for updates that are computed in shards and gathered over a slow link.

    - `sharded` sees gradients, state and parameters under `opt_state`, sharded over (data, replica). Pass a known norm
      of the gradients as `gradient_norm=`; otherwise `sharded` computes it to clip.
    - `gathered` sees the updates after the gather over `replica`, and parameters under `params`. It does the work that
      needs whole matrices; its state is only scalars. For element-wise optimizers it is the identity.
    - `learning_rate`: step -> learning rate, for reports; nan if it is not known
    - `only_shards`: `gathered` is the identity

    The parts have separate states: `sharded.init(parameters)`, `gathered.init(parameters)`.
    """

    sharded: optax.GradientTransformationExtraArgs
    gathered: optax.GradientTransformationExtraArgs
    learning_rate: optax.Schedule
    only_shards: bool = False

    @classmethod
    def of(cls, transformation: optax.GradientTransformation) -> "Optimizer":
        """Wrap any optax transformation whose updates may be computed on shards (element-wise, or by norms)."""
        identity = optax.with_extra_args_support(optax.identity())
        unknown = optax.constant_schedule(float("nan"))
        return cls(optax.with_extra_args_support(transformation), identity, unknown, only_shards=True)

    def whole(self) -> optax.GradientTransformationExtraArgs:
        """Return both parts in one, for a caller that does not gather updates in between."""
        return optax.chain(self.sharded, self.gathered)


@dataclass(frozen=True)
class OptimizerConfig(Settings, draccus.ChoiceRegistry):
    """The common settings of all optimizers: `update = -learning_rate(t) * (direction + weight_decay * parameter)`.

    Weight decay is decoupled from the gradient in all of them (Loshchilov and Hutter, 1711.05101).

    A new optimizer is a frozen subclass with `direction`, registered by name and imported in `optim/__init__.py`.
    One that needs whole matrices also overrides `build`, as Muon does.
    """

    scales_rates: ClassVar[bool] = False  # whether `Scaling` has the factors of its rates
    needs_whole_matrices: ClassVar[bool] = False  # it does not run on shards
    qk_clip = cast(float | None, None)  # the limit of attention's logits; None: there is none

    learning_rate: float = setting(
        1e-3, "peak learning rate", range=at_least(0), aliases=("lr", "peak_lr", "max_lr", "step_size", "outer_lr")
    )
    schedule: ScheduleConfig = setting(CosineSchedule(), "how the learning rate moves", aliases=("scheduler",))
    weight_decay: float = setting(
        0.0, "weight decay, times the learning rate", range=at_least(0), aliases=("wd", "decay_rate", "l2")
    )
    decay: str = setting("matrices", "matrices (embeddings are some) or all parameters", choices=("matrices", "all"))
    clip_norm: float | None = setting(
        1.0,
        "largest gradient norm; null: no clipping",
        range=above(0),
        aliases=("grad_clip", "clip", "gradient_clipping", "clip_grad_norm", "clip_grad", "gradient_clip"),
    )

    clip_update_norm: float | None = setting(
        None,
        "largest norm of a direction, before weight decay and rate; null: no clipping",
        range=above(0),
        by_topic=True,
    )
    moments: str = setting(
        "float32",
        "dtype of the state between steps; int8: in blocks with scales",
        choices=MOMENTS,
        aliases=("optim_dtype", "mu_dtype", "opt_dtype"),
        fixed=Fixed("it is the dtype of the state that a checkpoint has"),
        by_topic=True,
    )
    groups: tuple[GroupConfig, ...] = setting((), "parameters with rates and weight decays of their own", by_topic=True)

    @classmethod
    def default_choice_name(cls) -> str:
        return "adamw"

    def build(
        self, parameters, steps: int, layout: Layout | None = None, scalings: Sequence[Scaling] = ()
    ) -> Optimizer:
        """Return the optimizer for these parameters.

        - `parameters`: tree of NamedArrays or plain arrays, or their `ShapeDtypeStruct`s; only axes are read; untrained
          leaves are skipped
        - `steps`: length of the run, for the schedule
        - `layout`: the parameters' layout, for an optimizer that needs whole matrices; None outside of a mesh
        - `scalings`: factors by the model's size

        Raises `UserError` if the schedule does not fit the run.
        """
        schedule = self.build_schedule(self.learning_rate, steps)
        check_moments(self.moments, trainable(parameters), layout)
        groups = self.grouped(parameters, scalings)
        direction = kept_in(self.moments, self.direction())
        direction = optax.chain(groups.sizes(parameters), direction) if scalings else direction
        decay, rate = self.add_decay(parameters, groups), optax.scale_by_learning_rate(schedule)
        sharded = optax.chain(self.clip(), direction, decay, rate, groups.rates(parameters))
        return replace(Optimizer.of(sharded), learning_rate=schedule)

    def build_schedule(self, peak: float, steps: int) -> optax.Schedule:
        """Return the schedule step -> learning rate of a run of this length."""
        with below("schedule"):
            return self.schedule.build(peak, steps)

    def direction(self) -> optax.GradientTransformation:
        """Return the map from gradients to the descent direction, before weight decay and learning rate."""
        raise TypeError(f"{type(self).__name__} has no direction of its own; choose an optimizer by its type")

    def clip(self) -> optax.GradientTransformation:
        return optax.identity() if self.clip_norm is None else clip_by_norm(self.clip_norm)

    def grouped(self, parameters, scalings: Sequence[Scaling] = ()) -> Groups:
        """Return the groups; raise `KeyedError` for one without parameters."""
        groups = Groups(self.groups, scalings)
        groups.check(parameters)
        return groups

    def add_decay(self, parameters, groups: Groups) -> optax.GradientTransformation:
        """Return the weight decay of parameters, behind the limit of the direction's norm."""
        decay = self._decay(parameters, groups)
        if self.clip_update_norm is None:
            return decay
        return optax.chain(clip_by_norm(self.clip_update_norm, of_gradients=False), decay)

    def rules(self, parameters, scalings: Sequence[Scaling] = ()) -> dict[str, ParameterRule]:
        """Return the rule of each parameter by its name, for reports."""
        groups, found = self.grouped(parameters, scalings), {}
        for leaf, names in names_of_arrays(trainable(parameters)):
            algorithm, peak, own = self.rule_of(leaf, names, groups)
            for name in names:
                rate, decay = peak * own.rate_of(leaf, name), own.decay_of(leaf, name, self.decay_of)
                found[name] = ParameterRule(algorithm, rate, decay)
        return found

    def rule_of(self, leaf, names: Sequence[str], groups: Groups) -> tuple[str, float, Groups]:
        """Return the algorithm of a parameter, its peak without factors, and the groups that have the factors."""
        del leaf, names
        return self.get_choice_name(type(self)), self.learning_rate, groups

    def decay_of(self, leaf) -> float:
        """Return the weight decay of a parameter without a group."""
        return self.weight_decay if self.decay == "all" or decays(leaf) else 0.0

    def _decay(self, parameters, groups: Groups) -> optax.GradientTransformation:
        if groups:
            return groups.decay(parameters, self.decay_of)
        if not self.weight_decay:
            return optax.identity()
        mask = map_parameters(lambda leaf: self.decay == "all" or decays(leaf), parameters)
        return optax.add_decayed_weights(self.weight_decay, mask)


BETAS = {"range": DECAY, "aliases": ("beta", "beta1", "beta2", "adam_betas")}
EPSILON = {"range": Range(0, 1, above=True), "aliases": ("eps",)}


@OptimizerConfig.register_subclass("adamw")
@dataclass(frozen=True)
class AdamWConfig(OptimizerConfig):
    """AdamW (Kingma and Ba, 1412.6980; Loshchilov and Hutter, 1711.05101)."""

    scales_rates: ClassVar[bool] = True

    weight_decay: float = restated(OptimizerConfig, "weight_decay", 0.1)
    betas: tuple[float, float] = setting((0.9, 0.95), "decays of the first and second moment", **BETAS)
    epsilon: float = setting(1e-8, "added to the root of the second moment", **EPSILON)

    def direction(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(*self.betas, eps=self.epsilon)


@OptimizerConfig.register_subclass("lion")
@dataclass(frozen=True)
class LionConfig(OptimizerConfig):
    """Lion: the sign of an interpolated momentum (Chen et al., 2302.06675)."""

    scales_rates: ClassVar[bool] = True

    learning_rate: float = restated(
        OptimizerConfig, "learning_rate", 1e-4, "peak learning rate (a tenth to a third of AdamW's)"
    )
    weight_decay: float = restated(
        OptimizerConfig, "weight_decay", 1.0, "decoupled weight decay (three to ten times AdamW's)"
    )
    betas: tuple[float, float] = setting((0.9, 0.99), "decays in the sign and of the momentum", **BETAS)

    def direction(self) -> optax.GradientTransformation:
        return optax.scale_by_lion(*self.betas)


@OptimizerConfig.register_subclass("sgd")
@dataclass(frozen=True)
class SgdConfig(OptimizerConfig):
    """Gradient descent along the momentum `m = momentum * m + g`, or `g + momentum * m` (Nesterov)."""

    learning_rate: float = restated(OptimizerConfig, "learning_rate", 0.1)
    momentum: float = setting(
        0.9,
        "decay of the momentum; 0: none is kept",
        range=DECAY,
        fixed=Fixed("with 0 no momentum is kept, so there is none to go on with, or one too many", at=0),
    )
    nesterov: bool = setting(False, "look one step ahead along the momentum")
    momentum_warmup: int = setting(
        0,
        "steps over which the decay of the momentum rises from 0",
        range=whole(0),
        fixed=Fixed("with 0 no steps are counted, so there is no count to go on with, or one too many", at=0),
    )

    def direction(self) -> optax.GradientTransformation:
        if self.momentum and self.momentum_warmup:
            return rising_trace(self.momentum, self.nesterov, self.momentum_warmup)
        return optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()


class RisingTrace(NamedTuple):
    """The state of `rising_trace`."""

    count: jax.Array  # int32 []: steps so far
    trace: Tree  # m, like the gradients


def rising_trace(decay: float, nesterov: bool, steps: int) -> optax.GradientTransformation:
    """Return momentum whose decay rises linearly from 0 in the first step to `decay` after `steps` of them.

    d_t = decay min(1, t / steps), t from 0        m = d_t m + g        direction = m, or g + d_t m (Nesterov)
    """

    def init(params: Tree) -> RisingTrace:
        return RisingTrace(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, RisingTrace]:
        del params
        now = decay * jnp.minimum(1, state.count / steps)

        def added(m: jax.Array, g: jax.Array) -> jax.Array:
            return now.astype(g.dtype) * m + g

        trace = jax.tree.map(added, state.trace, updates)
        direction = jax.tree.map(added, trace, updates) if nesterov else trace
        return direction, RisingTrace(state.count + 1, trace)

    return optax.GradientTransformation(init, update)
