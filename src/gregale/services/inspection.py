"""The configuration of what is looked at in a step beside its loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from gregale.settings import Settings, whole

EACH = ("layer", "array")


@dataclass(frozen=True)
class InspectConfig(Settings):
    """Norms of parameters and gradients, update-to-weight ratios and the largest attention logits, layer by layer."""

    every: int | None = field(
        default=None,
        metadata={
            "help": "steps between them, each as long as a step; null: never",
            "range": whole(1),
        },
    )
    each: str = field(
        default="layer", metadata={"help": "of what there are norms: of each layer, or of each array", "choices": EACH}
    )
