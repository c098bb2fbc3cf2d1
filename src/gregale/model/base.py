"""Model configurations by their `type`, and the one that takes its shape from a model of the hub."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import draccus
import jax
from haliax import Axis, NamedArray

from gregale.model.parametrisation import Scaling
from gregale.settings import Fixed, Settings, check_path, setting

SHAPE = Fixed("the saved parameters have this shape")


Batch = dict[str, NamedArray]
"""`tokens`, `targets`, `loss_mask`, `positions` and, inside documents, `segment_ids`: [batch, position] each."""


class LanguageModel(Protocol):
    """The methods that a run needs of a model, an Equinox module whose floating-point arrays are trained.

    A model with a `gregale.axes.parameters.Buffer` also has `update_buffers(statistics, weight)`: it returns the model
    with new buffers, from the sums of `Losses.statistics` and of the weights over a whole step.

    `logits` is optional: sampling and tasks need it. A model may have faster forms of it: `prefill`, `decode` and
    `unstacked` for sampling with a cache, and `scores` for tasks (`gregale.model.llama.Llama`).
    """

    def loss(self, batch: Batch, execution: Any) -> tuple[jax.Array, jax.Array]:
        """Return the sum of the masked losses (nats) and the sum of the mask, both float32 scalars.

        - `execution`: a `gregale.model.execution.Execution`
        """
        ...


class DecoderSizes(NamedTuple):
    """The sizes from which the closed forms of a decoder's memory, time and traffic follow.

    - `windows`: of each layer, the keys that a query sees at most; None: all earlier ones
    - `norms_after`: the outputs of both halves of a layer are normalised
    - `norms_over_heads`: queries are normalised over all heads together, and keys
    - `active`: experts of a token; 0 for layers without experts
    - `balance_terms`: names of the terms of the loss that balance experts
    - `z_loss`: the loss has a z-loss
    """

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    windows: Sequence[int | None]
    norms_after: bool = False
    norms_over_heads: bool = False
    active: int = 0
    balance_terms: Sequence[str] = ()
    z_loss: bool = False


@dataclass(frozen=True)
class ModelConfig(Settings, draccus.ChoiceRegistry):
    """The choice of a model architecture by `type`.

    - `splits_positions`: the loss is that of whole sequences if several devices share each, in `axes.position_order`
    """

    splits_positions: ClassVar[bool] = False

    # Subclasses have these as fields, whose order they keep: annotated here they would be the first.
    vocabulary = cast(int | None, None)  # tokens; None: the tokenizer's, padded
    row_multiple = cast(int, 1)  # of the rows of a table with `vocabulary`
    layers = cast(int | None, None)  # stacked layers; None: it has none that a pipeline could run
    rotary_scaling = cast(Any, None)  # for a longer context
    experts = cast(Any, None)  # in place of MLPs
    kind_numbers: ClassVar[tuple[int, ...]] = ()  # of each layer, see `gregale.model.layer_kinds`
    score_softcap: ClassVar[float | None] = None  # the limit of attention scores; None: no limit

    @classmethod
    def default_choice_name(cls) -> str:
        return "llama"

    def init(self, Vocab: Axis, key: jax.Array) -> LanguageModel:
        """Return the model with its initial weights; it is traced, so that each device makes its shards.

        - `Vocab`: the padded vocabulary
        """
        raise TypeError(f"{type(self).__name__} makes no model; choose one by its type")

    def closed_form_sizes(self) -> DecoderSizes | None:
        """Return the sizes for closed forms; None for a model that has none: `gregale plan` then only compiles."""
        return None

    def split_axes(self) -> dict[str, tuple[str, Axis]]:
        """Return configuration key -> (meaning, axis) of every axis that a mesh may split, except the vocabulary."""
        return {}

    @property
    def scalings(self) -> tuple[Scaling, ...]:
        """Return the factors of rates by the model's size, see `model.parametrisation`; nothing: all are 1."""
        return ()

    @property
    def head_width(self) -> int:
        """Return the width of an attention head; 0 without attention."""
        return 0


@ModelConfig.register_subclass("huggingface")
@dataclass(frozen=True)
class HuggingFaceConfig(ModelConfig):
    """The shape in the config.json of a model of the hub, with random weights; a run keeps it as `type: llama`."""

    path: str = field(metadata={"help": "its folder, or its name on the hub: ORG/NAME or ORG/NAME@REVISION"})
    with_tokenizer: bool = setting(True, "its tokenizer too, unless data.tokenizer is another")

    def __post_init__(self):
        super().__post_init__()
        check_path("path", self.path)
