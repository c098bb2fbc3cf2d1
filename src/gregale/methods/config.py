"""The choice of a synchronisation method by `type`, and of its outer optimizer."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import draccus
import jax
import optax

from gregale.axes.layout import Layout, is_named
from gregale.axes.parameters import layer_order, layers_axis, trainable
from gregale.codecs.codec import ReduceConfig
from gregale.errors import KeyedError, UserError, below
from gregale.methods.diloco import Diloco, Mixing, sync_axis
from gregale.methods.method import Method
from gregale.methods.psdp import Psdp
from gregale.methods.schedule import PATTERNS, Schedule, Traffic
from gregale.model.config import CompilerOptions
from gregale.optim import ConstantSchedule, OptimizerConfig, SgdConfig
from gregale.settings import LAYOUT, Range, Rule, Settings, between, restated, setting, whole


@dataclass(frozen=True)
class OuterConfig(OptimizerConfig, draccus.ChoiceRegistry):  # named again: draccus looks at the bases for `type`
    """The choices of `OptimizerConfig` that run on shards, with a weight decay of 0 by default."""

    _choice_registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def get_known_choices(cls) -> dict[str, Any]:
        no_decay = [("weight_decay", float, restated(OptimizerConfig, "weight_decay", 0.0))]
        for name, kind in OptimizerConfig.get_known_choices().items():
            if name not in cls._choice_registry and not kind.needs_whole_matrices:
                cls._choice_registry[name] = make_dataclass(kind.__name__, no_decay, bases=(kind, cls), frozen=True)
        return cls._choice_registry

    @classmethod
    def get_choice_class(cls, name: str) -> Any:
        """Return the class of a choice; raise `KeyedError` for an optimizer that does not run on shards."""
        known = cls.get_known_choices()
        if name not in known and name in OptimizerConfig.get_known_choices():
            raise KeyedError(
                "type",
                f"is {name!r}",
                f": it needs whole matrices, and the outer optimizer runs on shards of the parameters. "
                f"{', '.join(known)} would work; sgd with momentum 0.9 and nesterov is the usual choice.",
            )
        return known[name]

    @classmethod
    def of(cls, optimizer: OptimizerConfig) -> "OuterConfig":
        """Return an optimizer of Python as an outer one; raise `UserError` for one that does not run on shards."""
        with below("sync.outer"):
            kind = cls.get_choice_class(optimizer.get_choice_name(type(optimizer)))
        return kind(**{each.name: getattr(optimizer, each.name) for each in fields(optimizer)})


_SGD = SgdConfig(
    learning_rate=0.7,
    momentum=0.9,
    nesterov=True,
    momentum_warmup=10,  # rounds: docs/results/diloco.md
    schedule=ConstantSchedule(),
    clip_norm=None,
)
OUTER = OuterConfig.of(_SGD)
SPARSE_OUTER = replace(OUTER, learning_rate=1.0, momentum=0.0, nesterov=False, momentum_warmup=0)  # the error is it


EVALUATED = ("outer", "average", "first_replica")

BY_TOPIC = {"by_topic": True}  # of a key that the help has with its section alone
DILOCO_ONLY = (
    "DiLoCo alone joins islands. Choose sync.type diloco or streaming_diloco, or make them replicas (mesh.replica)."
)
DILOCO_FOR_TOPK = (
    "it sends the largest values of a whole round's change. A single step's gradient loses too much of the others "
    "(0.54 nats in 600 steps of a small model). Choose sync.type diloco or streaming_diloco, or reduce.codec int4."
)
SHARDS_FOR_PSDP = (
    "its optimizer runs on shards of averages, and with one phase all replicas average everything. Set {1} to 2."
)
AVERAGES_ARE_MOMENTUM = (
    "its averages of gradients act as momentum does, beside what messages of topk lack and send later. Set {0} to sgd, "
    "or leave out sync.outer."
)
MOST_MOMENTUM = 0.5  # beside topk: docs/results/codecs.md
LESS_MOMENTUM = (
    "what messages of topk lack is kept and sent later, which acts as momentum does. Both together go too far (0.9 "
    "lost 0.47 nats in a small model). Set {0} to 0.5 at most, sync.outer.learning_rate to 1, or leave out sync.outer."
)
OUTER_ONLY = "its replicas have no outer parameters of which an average could be kept. Leave average out."
EXACT_ONLY = "the method sends float32 only. Set reduce.codec and reduce.gather_codec to none."


def much_momentum(config: Any, _: Any) -> bool:
    return config.sync.outer.momentum > MOST_MOMENTUM


class MethodContext(NamedTuple):
    layout: Layout  # the whole mesh
    psdp_on: Callable[[Layout], Psdp]  # the exact PSDP step on a layout, the whole one or one replica's
    reduce: ReduceConfig  # the codecs of messages over the slow axis
    steps: int  # of the run
    seed: int  # of the run
    compiler_options: CompilerOptions | None = None  # for programs that the method compiles itself


class Methods(NamedTuple):
    psdp: Psdp  # for the warm-up, and to convert one method's state to another's
    chosen: Method


@dataclass(frozen=True)
class SyncConfig(Settings, draccus.ChoiceRegistry):
    """The choice by `type` of the synchronisation of replicas."""

    @classmethod
    def default_choice_name(cls) -> str:
        return "psdp"

    def build(self, parts: MethodContext) -> Methods:
        """Return the methods; raise `UserError` if the mesh does not suit them."""
        raise TypeError(f"{type(self).__name__} is no method of its own; choose one by its type")

    @property
    def outer_rounds(self) -> "DilocoConfig | None":
        """The settings by which an outer optimizer joins replicas in rounds; None if it is not such a method."""
        return None

    def warm_up(self) -> int:
        """Return the steps of PSDP before the method's own begin."""
        return 0

    def separate_axis(self, layout: Layout) -> str | None:
        """Return the axis whose indices train separately, each on its rows; None if all make steps together."""
        del layout
        return None

    def between(self, begin: int | None, end: int | None) -> Self:
        """Return the configuration for a stage that has these steps; None: from, or to, where the run's own does."""
        del begin, end
        return self

    def check_begins(self, step: int) -> None:
        """Raise `UserError` if the method cannot begin after `step` steps."""
        del step

    def following(self, reduce: ReduceConfig) -> Self:
        """Return the configuration with the defaults that depend on the messages."""
        del reduce
        return self

    def compared(self) -> "dict[str, DilocoConfig | None]":
        """Return this and its variants by their names in `compared`; None: PSDP."""
        return {}

    @property
    def evaluates_replicas(self) -> bool:
        """Return whether evaluation uses the replicas' own parameters, which needs a mesh with replicas."""
        return False

    def notes(self, layout: Layout, steps: int, is_joined: bool = False) -> list[str]:
        """Return what a user should know of a run before it begins, such as probably unintended settings.

        - `steps`: of the whole run
        - `is_joined`: whether a network joins this mesh with others
        """
        del layout, steps, is_joined
        return []


@SyncConfig.register_subclass("psdp")
@dataclass(frozen=True)
class PsdpConfig(SyncConfig):
    """Gradients are averaged over replicas once a step; the optimizer runs on shards."""

    incompatible = (
        Rule("mesh.island & sync.type", DILOCO_ONLY, at=LAYOUT),
        Rule("sync.type & reduce.codec: topk", DILOCO_FOR_TOPK),
        Rule("sync.type & reduce.phases: 1", SHARDS_FOR_PSDP),
    )

    def compared(self) -> "dict[str, DilocoConfig | None]":
        return {"psdp": None}

    def build(self, parts: MethodContext) -> Methods:
        psdp = replace(parts.psdp_on(parts.layout), reduce=parts.reduce)
        return Methods(psdp, psdp)


@dataclass(frozen=True)
class MixingConfig(SyncConfig):
    """The base of choices whose replicas train separately and mix their parameters (`gregale.methods.diloco`)."""

    incompatible = (
        Rule("sync.type & reduce.codec", EXACT_ONLY, "reduce.quantised"),
        Rule("sync.type & average", OUTER_ONLY),
    )

    def mixing_method(self, inner: Psdp, layout: Layout) -> Mixing:
        """Return the method.

        - `inner`: the step of one replica
        - `layout`: the whole mesh
        """
        raise TypeError(f"{type(self).__name__} has no method of its own; choose one by its type")

    def build(self, parts: MethodContext) -> Methods:
        layout = parts.layout
        inner = parts.psdp_on(layout.inside(sync_axis(layout)))
        method = self.mixing_method(inner, layout)
        if not isinstance(method, Mixing):
            raise UserError(f"sync.type: {type(self).__name__}.mixing_method has to return a Mixing, not {method!r}.")
        return Methods(parts.psdp_on(layout), method)

    def separate_axis(self, layout: Layout) -> str:
        return sync_axis(layout)


@SyncConfig.register_subclass("diloco")
@dataclass(frozen=True)
class DilocoConfig(SyncConfig):
    """Replicas train separately; an outer optimizer joins them every `period` steps (arXiv 2311.08105)."""

    incompatible = (
        Rule("sync.outer.momentum & reduce.codec: topk", LESS_MOMENTUM, much_momentum),
        Rule("sync.outer.type != sgd & reduce.codec: topk", AVERAGES_ARE_MOMENTUM),
    )

    period: int = setting(
        100,
        "H: steps between two synchronisations",
        range=whole(1),
        aliases=("sync_every", "local_steps", "inner_steps", "h", "sync_interval", "sync.every", "sync.steps"),
    )
    outer: OuterConfig = setting(OUTER, "the outer optimizer; its steps are outer ones")
    warmup_steps: int = setting(0, "steps of PSDP before the replicas part", range=whole(0))
    dropout: float = setting(0.0, "probability that a replica misses a synchronisation", range=Range(0, 1, below=True))
    evaluate: str = setting("outer", "which parameters are evaluated and sampled", choices=EVALUATED)
    # The span of `outer.schedule`. It is no part of the method: an outer optimizer's state serves another span too.
    begin: int = field(
        default=0,
        compare=False,
        metadata={"help": "step after which outer steps begin; of a stage: the stage's", "range": whole(0)} | BY_TOPIC,
    )
    end: int | None = field(
        default=None,
        compare=False,
        metadata={"help": "step at which they end; null: the end of the run", "range": whole(1)} | BY_TOPIC,
    )

    def __post_init__(self):
        super().__post_init__()
        self.schedule(layers=2**31)
        if not isinstance(self.outer, OuterConfig):  # from Python
            object.__setattr__(self, "outer", OuterConfig.of(self.outer))
        decays = {f"groups.{number}.": each.weight_decay for number, each in enumerate(self.outer.groups)}
        for key, decay in {"": self.outer.weight_decay, **decays}.items():
            if decay:
                raise UserError(
                    f"sync.outer.{key}weight_decay is {decay:g}: weights decay in the inner steps "
                    f"(optimizer.weight_decay), the outer optimizer only joins replicas. Set it to 0."
                )

    def build(self, parts: MethodContext) -> Methods:
        """Build exact steps for replicas and warm-up: codecs apply only between replicas."""
        return Methods(parts.psdp_on(parts.layout), self.diloco(parts))

    def diloco(self, parts: MethodContext) -> Diloco:
        layout = parts.layout
        inner = parts.psdp_on(layout.inside(sync_axis(layout)))
        return Diloco(
            inner=inner,
            outer=self.outer_optimizer(inner, parts),
            layout=layout,
            schedule=self.schedule_of(inner.model),
            mixing=self.mixing,
            dropout=self.dropout,
            seed=parts.seed,
            reduce=parts.reduce,
            evaluate=self.evaluate,
        )

    @property
    def outer_rounds(self) -> "DilocoConfig":
        return self

    def outer_optimizer(self, inner: Psdp, parts: MethodContext) -> optax.GradientTransformation:
        with below("sync.outer"):
            end = parts.steps if self.end is None else self.end
            begin, schedule = max(self.warmup_steps, self.begin), self.schedule_of(inner.model)
            return self.outer.build(inner.model, max(1, schedule.outer_steps(begin, end))).whole()

    def between(self, begin: int | None, end: int | None) -> Self:
        return replace(self, end=self.end or end) if begin is None else replace(self, begin=begin, end=end)

    def check_begins(self, step: int) -> None:
        moves = not self.outer.schedule.is_constant or self.outer.schedule.warmup > 0
        if moves and step >= self.warmup_steps and max(self.warmup_steps, self.begin) != step:
            raise UserError(
                f"sync.begin is {self.begin}, but the outer steps begin after step {step:,}, and their learning rate "
                f"moves from there to the end. Set it to {step}."
            )

    def following(self, reduce: ReduceConfig) -> Self:
        is_default = self.outer is OUTER  # not one with the same values, which somebody chose
        return replace(self, outer=SPARSE_OUTER) if is_default and reduce.codec == "topk" else self

    def warm_up(self) -> int:
        return self.warmup_steps

    def compared(self) -> "dict[str, DilocoConfig | None]":
        return {"diloco": self}

    def separate_axis(self, layout: Layout) -> str:
        return sync_axis(layout)

    @property
    def evaluates_replicas(self) -> bool:
        return self.evaluate != "outer"

    def notes(self, layout: Layout, steps: int, is_joined: bool = False) -> list[str]:
        """Return notes of a single replica, and of the end."""
        schedule, found = self.schedule(layers=2**31), []
        last = schedule.last_sent(steps)
        if not is_joined and layout.axis(sync_axis(layout)).size == 1:
            found.append(
                f"sync.type is {self.get_choice_name(type(self))}, but mesh.replica is 1: there is no other replica to "
                f"be joined with, so the outer optimizer moves this one by itself, every {self.period} steps."
            )
        if last < steps or schedule.fragments > 1:
            each = f", one fragment of {schedule.fragments} at a time" if schedule.fragments > 1 else ""
            then = "Evaluations, samples, exports and start_from read the model after one more, of all of it."
            then = "The fleet's run ends with one more, of all of it." if is_joined else then
            found.append(f"The last synchronisation comes after step {last:,} of {steps:,}{each}. {then}")
        return found

    @property
    def mixing(self) -> float:
        """Return alpha, the weight of a replica's own parameters."""
        return 0.0

    def schedule_of(self, model: Any) -> Schedule:
        """Return the schedule of sends and applications for a model."""
        order, trained = layer_order(model), jax.tree.leaves(trainable(model), is_leaf=is_named)
        only_layers = all(layers_axis(leaf) is not None for leaf in trained)
        return replace(self.schedule(len(order)), order=order if any(order) else (), only_layers=only_layers)

    def schedule(self, layers: int) -> Schedule:
        """Return the schedule of sends and applications for a number of layers; raise `UserError`."""
        return Schedule(period=self.period, layers=layers)


@SyncConfig.register_subclass("streaming_diloco")
@dataclass(frozen=True)
class StreamingDilocoConfig(DilocoConfig):
    """DiLoCo by fragments, staggered over the period and hidden behind the steps (arXiv 2501.18512)."""

    fragments: int = setting(4, "P: all that is not in layers, and P - 1 groups of layers", range=whole(1))
    delay: int = setting(2, "tau: steps from sending to applying; 2 or more hides all of it", range=whole(0))
    alpha: float = setting(0.5, "what a replica keeps of its own when a fragment arrives", range=between(0, 1))
    pattern: str = setting("strided", "layers of a fragment: strided or sequential", choices=PATTERNS)

    @property
    def mixing(self) -> float:
        return self.alpha

    def compared(self) -> dict[str, DilocoConfig | None]:
        usual = min(StreamingDilocoConfig().delay, self.period - 1)
        at_once = replace(self, delay=0) if self.delay else self
        return {"streaming": at_once, "streaming_overlap": self if self.delay else replace(self, delay=usual)}

    def schedule(self, layers: int) -> Schedule:
        return Schedule(self.period, self.fragments, self.delay, layers, self.pattern)


@dataclass(frozen=True)
class Compared:
    """A method in a comparison."""

    sync: DilocoConfig | None  # its settings; None for PSDP
    configured: bool  # whether they are the configuration's own

    def schedule(self, layers: int) -> Schedule:
        """Return H, P and tau; PSDP joins everything in every step."""
        return Schedule(period=1, layers=layers) if self.sync is None else self.sync.schedule(layers)

    def reduce(self, given: ReduceConfig) -> ReduceConfig:
        """Return the codecs of its messages: those of PSDP have two phases."""
        return replace(given, phases=2) if self.sync is None else given

    def traffic(self, parts: MethodContext) -> Traffic:
        """Return the traffic over the slow axis; for PSDP too, that is the axis that DiLoCo would join."""
        method = (self.sync or DilocoConfig()).diloco(parts._replace(reduce=self.reduce(parts.reduce)))
        if self.sync is None:
            return Traffic.of_every_step(method.outer_store.reducer, trainable(method.inner.model))
        return method.traffic()


def compared(sync: SyncConfig, layers: int, only_layers: bool = False) -> dict[str, Compared]:
    """Return the methods by name. Settings outside the configuration have their defaults, as far as these are valid.

    If the configuration has a period, all methods use it.

    - `only_layers`: all parameters are in layers
    """
    own = sync.compared()
    period = next((each.period for each in own.values() if each is not None), DilocoConfig().period)
    default = StreamingDilocoConfig()
    fragments, delay = min(default.fragments, layers + (not only_layers), period), min(default.delay, period - 1)
    streaming = StreamingDilocoConfig(period=period, fragments=fragments, delay=delay)
    found: dict[str, DilocoConfig | None] = {
        "psdp": None,
        "diloco": DilocoConfig(period=period),
        "streaming": replace(streaming, delay=0),
        "streaming_overlap": streaming,
    }
    return {
        name: Compared(each, name in own and (each is None or each is sync)) for name, each in (found | own).items()
    }
