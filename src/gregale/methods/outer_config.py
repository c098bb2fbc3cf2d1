"""The choice of an outer optimizer: element-wise, and without weight decay, which belongs to the inner steps."""

from dataclasses import dataclass, fields, make_dataclass
from typing import Any, ClassVar

import draccus

from gregale.errors import KeyedError, below
from gregale.optim import ConstantSchedule, MuonConfig, OptimizerConfig, SgdConfig
from gregale.settings import restated


@dataclass(frozen=True)
class OuterConfig(OptimizerConfig, draccus.ChoiceRegistry):  # named again: draccus looks at the bases for `type`
    """The choices of `OptimizerConfig` that run on shards, with a weight decay of 0 by default."""

    _choice_registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def get_known_choices(cls) -> dict[str, Any]:
        no_decay = [("weight_decay", float, restated(OptimizerConfig, "weight_decay", 0.0))]
        for name, kind in OptimizerConfig.get_known_choices().items():
            if name not in cls._choice_registry and not issubclass(kind, MuonConfig):
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


_SGD = SgdConfig(learning_rate=0.7, momentum=0.9, nesterov=True, schedule=ConstantSchedule(), clip_norm=None)
OUTER = OuterConfig.of(_SGD)
