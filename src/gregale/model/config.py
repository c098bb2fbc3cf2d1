"""The configuration of models of the Llama family."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from haliax import Axis

from gregale.errors import KeyedError
from gregale.model.base import SHAPE, DecoderSizes
from gregale.model.experts_config import ExpertsConfig
from gregale.model.losses import Logits
from gregale.model.parametrisation import BASE, Parametrisation, Scaling
from gregale.model.scaling import MEANING, RotaryScaling
from gregale.model.sizes import Sizes
from gregale.settings import Range, at_least, setting, whole

NORMS = ("before", "after", "around")
ACTIVATIONS = ("silu", "gelu")
QK_NORM_OVER = ("head", "heads")


class LayerKind(NamedTuple):
    """The differences between the layers of a stack."""

    window: int | None  # the number of tokens that a token sees, itself included; None: all earlier tokens
    rotary_base: float
    rotary_scaling: RotaryScaling | None

    @property
    def score_factor(self) -> float:
        """Return the factor of attention's scores."""
        return 1.0 if self.rotary_scaling is None else self.rotary_scaling.score_factor


@dataclass(frozen=True)
class DecoderConfig(Sizes):
    """The settings of the Llama family's layers; `gregale.model.llama` has the types that make models of them."""

    splits_positions: ClassVar[bool] = True

    # Only `GptOssConfig` has others.
    sinks: ClassVar[bool] = False  # attention has sinks, see `kernels.sinks`
    biased: ClassVar[bool] = False  # attention's output, the router and the experts have biases
    # Only `GemmaConfig` has settings for these.
    activation: ClassVar[str] = "silu"
    norm_offset: ClassVar[float] = 0.0
    score_width: ClassVar[float | None] = None
    logit_softcap: ClassVar[float | None] = None
    scaled_embedding: ClassVar[bool] = False
    window_rotary_base: ClassVar[float | None] = None

    experts: ExpertsConfig | None = field(
        default=None, metadata={"help": "experts in place of MLPs; null: none", "fixed": SHAPE, "by_topic": True}
    )
    dense_layers: int = setting(
        0,
        "first layers, with an MLP in place of experts",
        range=whole(0),
        aliases=("first_num_dense_layers", "first_k_dense_replace", "n_dense_layers", "num_dense_layers"),
        fixed=SHAPE,
        by_topic=True,
    )
    norms: str = setting("before", "normalise what a layer takes, gives, or both", choices=NORMS, fixed=MEANING)
    qk_norm: bool = setting(False, "RMSNorm on queries and keys (Qwen 3)", aliases=("qk_layernorm",), fixed=SHAPE)
    qk_norm_over: str = setting("head", "one head's values, or all heads' (OLMo 2)", choices=QK_NORM_OVER, fixed=SHAPE)
    attention_bias: bool = setting(False, "biases on query, key and value (Qwen 2)", aliases=("qkv_bias",), fixed=SHAPE)
    sliding_window: int | None = setting(
        None,
        "tokens that a token sees at most (Mistral)",
        range=whole(1),
        aliases=("window_size", "attention_window", "window"),
        fixed=MEANING,
    )
    full_layers: tuple[int, ...] = setting(
        (), "layers, from 0, that see all tokens", range=whole(0), unique=True, fixed=MEANING
    )
    norm_epsilon: float = setting(
        1e-5,
        "added to the mean square in RMSNorm",
        range=Range(0, 1, above=True),
        aliases=("rms_norm_eps", "rms_norm_epsilon"),
        fixed=MEANING,
    )
    rotary_base: float = setting(
        10000.0,
        "base of the rotary wavelengths",
        range=at_least(1),
        aliases=("rotary_theta", "theta"),
        fixed=MEANING,
    )
    rotary_scaling: RotaryScaling | None = setting(
        None, "for a longer context; null: none", aliases=("rope_scaling",), fixed=MEANING
    )
    z_loss: float = setting(
        0.0,
        "coefficient of the squared logsumexp of the logits (PaLM)",
        range=at_least(0),
        aliases=("z_loss_multiplier", "z_loss_coef"),
        by_topic=True,
    )
    init_scale: float = setting(
        0.02, "standard deviation of the initial weights", range=at_least(0), aliases=("initializer_range", "init_std")
    )
    parametrisation: Parametrisation | None = setting(
        None, "factors of initial weights and rates by the model's size; null: none", fixed=BASE, by_topic=True
    )

    def __post_init__(self):
        super().__post_init__()
        if beyond := [layer for layer in self.full_layers if layer >= self.layers]:
            raise KeyedError(
                "full_layers", f"names {beyond[0]}", f", and there are {self.layers} layers: 0 to {self.layers - 1}."
            )
        if self.dense_layers and (self.experts is None or self.dense_layers >= self.layers):
            reason = "there are no experts" if self.experts is None else f"there are {self.layers} layers"
            raise KeyedError("dense_layers", f"is {self.dense_layers}", f", and {reason}: no layer would have experts.")
        for name, used in (("full_layers", self.full_layers), ("window_rotary_base", self.window_rotary_base)):
            if used and self.sliding_window is None:
                raise KeyedError(name, f"is {used}", ", but there is no sliding_window that layers could have or lack.")

    @property
    def scalings(self) -> tuple[Scaling, ...]:
        return () if self.parametrisation is None else self.parametrisation.scalings(self)

    def closed_form_sizes(self) -> DecoderSizes | None:
        kinds = self.kinds
        return DecoderSizes(
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.KvHeads.size,
            head_size=self.HeadSize.size,
            windows=[kinds[kind].window for kind in self.kind_numbers],
            norms_after=self.norms != "before",
            norms_over_heads=self.qk_norm and self.qk_norm_over == "heads",
            active=0 if self.experts is None else self.experts.active,
            balance_terms=() if self.experts is None else self.experts.balance.terms,
            z_loss=self.z_loss > 0,
        )

    @property
    def logits(self) -> Logits:
        return Logits(self.logit_softcap, self.vocabulary if self.row_multiple > 1 else None, self.z_loss)

    @property
    def window_of_all(self) -> int | None:
        """Return the window of all layers; None if some layer has none."""
        return None if self.full_layers else self.sliding_window

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Return the different kinds of layers, in the order of their first layers."""
        return tuple(dict.fromkeys(map(self._kind, range(self.layers))))

    @property
    def kind_numbers(self) -> tuple[int, ...]:
        """Return the kind of each layer, as an index in `kinds`."""
        kinds = self.kinds
        return tuple(kinds.index(self._kind(layer)) for layer in range(self.layers))

    @property
    def structure_numbers(self) -> tuple[int, ...]:
        """Return the structure of each layer, see `structure`."""
        return (
            tuple(int(layer >= self.dense_layers) for layer in range(self.layers))
            if self.dense_layers
            else (0,) * self.layers
        )

    def structure(self, number: int) -> "DecoderConfig":
        """Return the sizes of the layers of a structure, as a configuration; a subclass may have several."""
        if not self.dense_layers:
            return self
        return replace(self, dense_layers=0, experts=self.experts if number else None)

    def split_axes(self) -> dict[str, tuple[str, Axis]]:
        found = super().split_axes()
        if self.experts is None:
            return found
        if not self.dense_layers:
            del found["model.mlp"]
        found["model.experts.count"] = ("the number of experts", self.experts.Experts)
        found["model.experts.width"] = ("the width of an expert", self.experts.Mlp)
        if self.experts.shared:
            found["model.experts.shared"] = ("the width of the MLP of all tokens", Axis("mlp", self.experts.shared))
        return found

    def _kind(self, layer: int) -> LayerKind:
        if self.sliding_window is None or layer in self.full_layers:
            return LayerKind(None, self.rotary_base, self.rotary_scaling)
        if self.window_rotary_base is None:
            return LayerKind(self.sliding_window, self.rotary_base, self.rotary_scaling)
        return LayerKind(self.sliding_window, self.window_rotary_base, None)

    def normalised_together(self, Heads: Axis) -> tuple[Axis, ...] | None:
        """Return the axes of the queries' or keys' norm; None if they are not normalised."""
        if not self.qk_norm:
            return None
        return (Heads, self.HeadSize) if self.qk_norm_over == "heads" else (self.HeadSize,)
