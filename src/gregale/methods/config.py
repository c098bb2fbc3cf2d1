"""The choice of a synchronisation method."""

from __future__ import annotations

from dataclasses import dataclass

import draccus


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
