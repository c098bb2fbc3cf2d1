"""Provides the groups of parameters with the same algorithm, rate and weight decay, for reports."""

import re
from typing import Any

from gregale.optim.config import ParameterRule
from gregale.programs.runtime.setup import Setup


def rules_of(setup: Setup) -> dict[str, ParameterRule]:
    """Return the rule of each parameter: Muon's, `optimizer.groups` and `model.parametrisation` together.

    Nothing if all parameters have the same algorithm and rate.
    """
    rules = setup.config.optimizer.rules(setup.model, setup.config.model.scalings)
    return rules if len({rule[:2] for rule in rules.values()}) > 1 else {}


def parameter_groups(setup: Setup) -> list[dict[str, Any]]:
    """Return the groups of `rules_of`; `layer.*` stands for all layers, if they have the same rule."""
    rules = rules_of(setup)
    general = {name: re.sub(r"^layer\.\d+", "layer.*", name) for name in rules}
    of_layers: dict[str, set[ParameterRule]] = {}
    for name, rule in rules.items():
        of_layers.setdefault(general[name], set()).add(rule)
    shown = {name: general[name] if len(of_layers[general[name]]) == 1 else name for name in rules}
    return [
        {**rule._asdict(), "parameters": list(dict.fromkeys(shown[name] for name in rules if rules[name] == rule))}
        for rule in dict.fromkeys(rules.values())
    ]
