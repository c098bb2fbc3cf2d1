"""The configuration of adapters: small trained weights beside frozen ones."""

from dataclasses import dataclass

import draccus

from gregale.model.base import SHAPE
from gregale.model.scaling import MEANING
from gregale.settings import Fixed, Range, Settings, above, setting, whole

MLP_TARGETS = ("gate", "up", "down")
EXPERT_TARGETS = {f"expert_{name}": name for name in MLP_TARGETS}  # the names of matrices of experts in their layer
TARGETS = ("query", "key", "value", "out", *MLP_TARGETS)  # of linear layers
SCALINGS = ("standard", "rank_stabilised")
BASES = ("dtype", "int8", "nf4")


@dataclass(frozen=True)
class AdapterConfig(Settings, draccus.ChoiceRegistry):
    """The choice of an adapter by `type`."""

    @classmethod
    def default_choice_name(cls) -> str:
        return "lora"


@AdapterConfig.register_subclass("lora")
@dataclass(frozen=True)
class LoraConfig(AdapterConfig):
    """LoRA (arXiv 2106.09685): y = x W + scale * (x A) B, where W is frozen, A is drawn and B is zero at the start."""

    rank: int = setting(16, "width of x A", range=whole(1), aliases=("r", "lora_r"), fixed=SHAPE, by_topic=True)
    alpha: float = setting(
        32.0, "scale times rank, or its root", range=above(0), aliases=("lora_alpha",), fixed=MEANING, by_topic=True
    )
    scaling: str = setting(
        "standard",
        "scale is alpha / rank, or alpha / sqrt(rank) (arXiv 2312.03732)",
        choices=SCALINGS,
        aliases=("use_rslora",),
        fixed=MEANING,
        by_topic=True,
    )
    dropout: float = setting(
        0.0, "share of x that A does not see", range=Range(0, 1, below=True), aliases=("lora_dropout",), by_topic=True
    )
    targets: tuple[str, ...] = setting(
        ("query", "value"),
        "projections with an adapter",
        choices=(*TARGETS, *EXPERT_TARGETS),
        unique=True,
        aliases=("target_modules",),
        fixed=SHAPE,
        by_topic=True,
    )
    base: str = setting(
        "dtype",
        "frozen projections: in compute.dtype, or in blocks of 64 values in 8 or 4 bits (QLoRA, arXiv 2305.14314)",
        choices=BASES,
        aliases=("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type"),
        fixed=MEANING,
        by_topic=True,
    )
    start_from: str | None = setting(
        None,
        "run with adapters, or folder of PEFT, whose adapters to continue; null: new ones",
        fixed=Fixed("it was read before the first step"),
        by_topic=True,
    )

    @property
    def expert_targets(self) -> list[str]:
        """Return the names of adapted matrices of experts, in their layer."""
        return [name for target, name in EXPERT_TARGETS.items() if target in self.targets]

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank if self.scaling == "standard" else self.rank**0.5)
