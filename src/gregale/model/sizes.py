"""The sizes of a decoder: its configuration keys and named axes."""

from dataclasses import dataclass

from haliax import Axis

from gregale.axes.layout import EMBED, LAYERS
from gregale.errors import KeyedError, UserError
from gregale.model.base import SHAPE, ModelConfig
from gregale.settings import setting, whole


@dataclass(frozen=True)
class Sizes(ModelConfig):
    """The settings that determine the parameter shapes of a decoder-only model."""

    layers: int = setting(
        12,
        "number of layers",
        range=whole(1, 100_000),
        aliases=("num_hidden_layers", "depth"),
        fixed=SHAPE,
    )
    hidden: int = setting(
        768,
        "width of the residual stream",
        range=whole(1),
        aliases=("hidden_size", "dim", "d_model", "embed_dim", "width", "embed"),
        fixed=SHAPE,
    )
    heads: int = setting(
        12,
        "query heads",
        range=whole(1),
        aliases=("num_attention_heads",),
        fixed=SHAPE,
    )
    kv_heads: int | None = setting(
        None,
        "key and value heads; null: as many as heads",
        range=whole(1),
        aliases=("num_key_value_heads", "num_query_groups"),
        fixed=SHAPE,
    )
    head_size: int | None = setting(
        None,
        "width of a head; null: hidden / heads",
        range=whole(1),
        aliases=("d_head", "d_kv"),
        fixed=SHAPE,
    )
    mlp: int = setting(
        2048,
        "width of the gated layer",
        range=whole(1),
        aliases=("ffn_dim", "mlp_dim", "d_ff", "ffn_hidden_size", "mlp_size"),
        fixed=SHAPE,
    )
    vocabulary: int | None = setting(
        None,
        "rows of tables; null: the tokenizer's",
        range=whole(1),
        aliases=("vocab", "vocabulary_size", "n_vocab"),
        fixed=SHAPE,
    )
    row_multiple: int = setting(1, "rows are filled up to it, without logits", range=whole(1), fixed=SHAPE)
    tied_head: bool = setting(
        False,
        "the output head is the embedding table",
        aliases=("tied_embeddings", "weight_tying"),
        fixed=SHAPE,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.row_multiple > 1 and self.vocabulary is None:
            raise KeyedError(
                "row_multiple",
                f"is {self.row_multiple}",
                ", but vocabulary is null, which is the tokenizer's and filled up already; give the rows of a table.",
            )
        if self.head_size is None and self.hidden % self.heads:
            raise UserError(
                f"model.hidden is {self.hidden} and model.heads is {self.heads}: {self.hidden} / {self.heads} = "
                f"{self.hidden / self.heads:.4g} is not a whole head size. Choose heads that divide {self.hidden}, or "
                f"set model.head_size."
            )
        if self.heads % self.KvHeads.size:
            raise UserError(
                f"model.heads is {self.heads} and model.kv_heads is {self.kv_heads}: each key and value head serves "
                f"heads / kv_heads query heads, and {self.heads} / {self.kv_heads} is not a whole number."
            )
        if self.HeadSize.size % 2:
            raise UserError(f"model.head_size is {self.HeadSize.size}; rotary embeddings need an even one.")

    @property
    def Layers(self) -> Axis:
        return Axis(LAYERS, self.layers)

    @property
    def Embed(self) -> Axis:
        return Axis(EMBED, self.hidden)

    @property
    def Heads(self) -> Axis:
        return Axis("heads", self.heads)

    @property
    def KvHeads(self) -> Axis:
        return Axis("kv_heads", self.kv_heads or self.heads)

    @property
    def HeadSize(self) -> Axis:
        return Axis("head_size", self.head_size or self.hidden // self.heads)

    @property
    def head_width(self) -> int:
        return self.HeadSize.size

    @property
    def Mlp(self) -> Axis:
        return Axis("mlp", self.mlp)

    def split_axes(self) -> dict[str, tuple[str, Axis]]:
        """Return configuration key -> (meaning, axis) of every axis that a mesh may split."""
        return {
            "model.hidden": ("the width of the residual stream", self.Embed),
            "model.heads": ("the query heads", self.Heads),
            "model.kv_heads": ("the key and value heads", self.KvHeads),
            "model.mlp": ("the width of the gated layer", self.Mlp),
        }
