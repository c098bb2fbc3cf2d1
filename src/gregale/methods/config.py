"""The choice of a synchronisation method."""

from __future__ import annotations

from dataclasses import dataclass, field

import draccus

from gregale.errors import UserError
from gregale.methods.schedule import PATTERNS, Schedule
from gregale.optim import ConstantSchedule, MuonConfig, OptimizerConfig, SgdConfig

EVALUATED = ("outer", "average", "first_replica")

OUTER = SgdConfig(learning_rate=0.7, momentum=0.9, nesterov=True, schedule=ConstantSchedule(), clip_norm=None)


@dataclass(frozen=True)
class SyncConfig(draccus.ChoiceRegistry):
    """How replicas are kept together, by `type`."""

    @classmethod
    def default_choice_name(cls) -> str:
        return "psdp"


@SyncConfig.register_subclass("psdp")
@dataclass(frozen=True)
class PsdpConfig(SyncConfig):
    """Gradients are averaged over replicas once a step; the optimizer runs on shards."""


@SyncConfig.register_subclass("diloco")
@dataclass(frozen=True)
class DilocoConfig(SyncConfig):
    """Replicas train apart and are joined by an outer optimizer every `period` steps (arXiv 2311.08105)."""

    period: int = field(default=100, metadata={"help": "H: steps between two synchronisations"})
    outer: OptimizerConfig = field(default=OUTER, metadata={"help": "the outer optimizer; its steps are outer ones"})
    warmup_steps: int = field(default=0, metadata={"help": "steps of PSDP before the replicas part"})
    dropout: float = field(default=0.0, metadata={"help": "probability that a replica misses a synchronisation"})
    evaluate: str = field(
        default="outer", metadata={"help": "which parameters are evaluated and sampled", "choices": EVALUATED}
    )

    def __post_init__(self):
        self.schedule(layers=2**31)
        if self.warmup_steps < 0:
            raise UserError(f"sync.warmup_steps is {self.warmup_steps}; it has to be at least 0.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"sync.dropout is {self.dropout:g}; it is a probability, below 1.")
        if self.evaluate not in EVALUATED:
            raise UserError(f"sync.evaluate is {self.evaluate!r}; valid choices: {', '.join(EVALUATED)}.")
        if isinstance(self.outer, MuonConfig):
            raise UserError(
                "sync.outer.type is 'muon': the outer optimizer runs on shards of the parameters, and Muon needs whole "
                "matrices. adamw, lion and sgd would work; sgd with momentum 0.9 and nesterov is the usual choice."
            )
        if self.outer.weight_decay:
            raise UserError(
                f"sync.outer.weight_decay is {self.outer.weight_decay:g}: weights decay in the inner steps "
                f"(optimizer.weight_decay), the outer optimizer only joins replicas. Set it to 0."
            )

    @property
    def mixing(self) -> float:
        """alpha: what a replica keeps of its own."""
        return 0.0

    def schedule(self, layers: int) -> Schedule:
        """When which fragment is sent and applied, for a model of so many layers; raises `UserError`."""
        return Schedule(period=self.period, layers=layers)


@SyncConfig.register_subclass("streaming_diloco")
@dataclass(frozen=True)
class StreamingDilocoConfig(DilocoConfig):
    """DiLoCo a fragment at a time, staggered over the period and hidden behind the steps (arXiv 2501.18512)."""

    fragments: int = field(default=4, metadata={"help": "P: all that is not in layers, and P - 1 groups of layers"})
    delay: int = field(default=2, metadata={"help": "tau: steps from sending to applying; 2 or more hides all of it"})
    alpha: float = field(default=0.5, metadata={"help": "what a replica keeps of its own when a fragment arrives"})
    pattern: str = field(
        default="strided", metadata={"help": "layers of a fragment: strided or sequential", "choices": PATTERNS}
    )

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise UserError(f"sync.alpha is {self.alpha:g}; a replica keeps from 0 (nothing) to 1 (all) of its own.")

    @property
    def mixing(self) -> float:
        return self.alpha

    def schedule(self, layers: int) -> Schedule:
        return Schedule(self.period, self.fragments, self.delay, layers, self.pattern)
