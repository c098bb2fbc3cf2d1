"""The choice of an optimizer, and its construction."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import draccus
import optax

from gregale.audit.traffic import Transfer, squared_norms
from gregale.axes.layout import Layout, named_arrays
from gregale.axes.parameters import names_of_arrays, trainable
from gregale.errors import below
from gregale.model.parametrisation import Scaling
from gregale.optim.clipping import clip_by_norm
from gregale.optim.groups import GroupConfig, Groups, ParameterRule
from gregale.optim.matrices import decays, map_parameters
from gregale.optim.schedules import CosineSchedule, ScheduleConfig
from gregale.settings import DECAY, Fixed, Range, Settings, above, at_least, restated, setting


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
    One that needs whole matrices also overrides `build`, `transfers`, `update_bytes` and `update_flops`, as Muon does.
    """

    scales_rates: ClassVar[bool] = False  # whether `Scaling` has the factors of its rates

    learning_rate: float = setting(
        1e-3, "peak learning rate", range=at_least(0), aliases=("lr", "peak_lr", "max_lr", "step_size", "outer_lr")
    )
    schedule: ScheduleConfig = setting(
        CosineSchedule(),
        "how the learning rate moves",
        aliases=("scheduler", "lr_scheduler", "lr_scheduler_type"),
    )
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
        groups = self.grouped(parameters, scalings)
        direction = optax.chain(groups.sizes(parameters), self.direction()) if scalings else self.direction()
        decay, rate = self.add_decay(parameters, groups), optax.scale_by_learning_rate(schedule)
        sharded = optax.chain(self.clip(), direction, decay, rate, groups.rates(parameters))
        return replace(Optimizer.of(sharded), learning_rate=schedule)

    def transfers(self, parameters, layout: Layout) -> list[Transfer]:
        """Return the transfers of an update, in closed form; the arguments are those of `build`."""
        return [] if self.clip_update_norm is None else squared_norms(named_arrays(parameters), layout)

    def update_bytes(self, parameters, layout: Layout) -> int:
        """Return a device's memory for `gathered` beside its input updates, in closed form; 0 if negligible."""
        del parameters, layout
        return 0

    def update_flops(self, parameters, layout: Layout) -> int:
        """Return the FLOPs of the matrix products of `gathered` on a device, in closed form; 0 if there are none."""
        del parameters, layout
        return 0

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
EPSILON = {"range": Range(0, 1, above=True), "aliases": ("eps", "adam_epsilon")}


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

    def direction(self) -> optax.GradientTransformation:
        return optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()
