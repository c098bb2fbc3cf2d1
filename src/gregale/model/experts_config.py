"""The configuration of layers with experts."""

from dataclasses import dataclass, field

from haliax import Axis

from gregale.axes.layout import EXPERTS, ROUTER
from gregale.errors import KeyedError
from gregale.model.base import SHAPE
from gregale.model.scaling import MEANING
from gregale.settings import Settings, above, at_least, between, setting, whole

SCORES = ("softmax", "sigmoid")
ROUTERS = ("dtype", "float32")
BALANCE, Z = "balance_loss", "router_z_loss"  # terms of the loss


@dataclass(frozen=True)
class BalanceConfig(Settings):
    """The terms that make experts take equally many tokens (docs/experts.md, "Balance")."""

    loss: float = setting(
        0.0,
        "coefficient of the balance loss",
        range=at_least(0),
        aliases=("router_aux_loss_coef", "aux_loss_alpha", "load_balance_loss_weight", "lbl_coef", "lbl_loss_weight"),
        by_topic=True,
    )
    z_loss: float = setting(
        0.0,
        "coefficient of the mean squared logsumexp of the router's logits",
        range=at_least(0),
        aliases=("router_z_loss_coef", "rzl_coef", "moe_z_loss_coeff"),
        by_topic=True,
    )
    bias: bool = setting(
        False,
        "a bias of each expert, for the choice alone (DeepSeek V3)",
        aliases=("routed_bias", "use_expert_bias", "moe_router_enable_expert_bias"),
        fixed=SHAPE,
        by_topic=True,
    )
    bias_rate: float = setting(
        1e-3,
        "change of a bias in a step; 0: biases stay",
        range=between(0, 1),
        aliases=("routed_bias_update_rate", "moe_router_bias_update_rate"),
        by_topic=True,
    )

    @property
    def terms(self) -> tuple[str, ...]:
        """Return the names of the terms in the loss."""
        coefficients = {BALANCE: self.loss, Z: self.z_loss}
        return tuple(name for name, coefficient in coefficients.items() if coefficient)


@dataclass(frozen=True)
class ExpertsConfig(Settings):
    """A mixture of experts in place of an MLP: each token passes through `active` of `count` small MLPs."""

    count: int = setting(
        8,
        "experts of a layer",
        range=whole(2),
        aliases=("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "n_experts"),
        fixed=SHAPE,
        by_topic=True,
    )
    active: int = setting(
        2,
        "experts of a token",
        range=whole(1),
        aliases=("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_top_k", "router_topk"),
        fixed=MEANING,
        by_topic=True,
    )
    width: int = setting(
        768,
        "width of an expert",
        range=whole(1),
        aliases=(
            *("moe_intermediate_size", "moe_mlp_dim", "base_moe_mlp_dim", "moe_hidden_dim", "moe_ffn_hidden_size"),
            *(f"model.experts.{name}" for name in ("hidden", "hidden_size", "hidden_dim", "mlp", "ffn_dim", "d_ff")),
        ),
        fixed=SHAPE,
        by_topic=True,
    )
    shared: int = setting(
        0,
        "width of an MLP for all tokens, beside the experts; 0: none",
        range=whole(0),
        aliases=("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        fixed=SHAPE,
        by_topic=True,
    )
    shared_gate: bool = setting(
        False, "a sigmoid of each token weighs that MLP (Qwen 2 MoE)", fixed=SHAPE, by_topic=True
    )
    renormalise: bool = setting(
        True,
        "the weights of a token's experts sum to 1",
        aliases=("norm_topk_prob", "route_norm", "norm_topk"),
        fixed=MEANING,
        by_topic=True,
    )
    score: str = setting(
        "softmax",
        "of the router's logits",
        choices=SCORES,
        aliases=("scoring_func", "score_func", "routed_score_func", "moe_router_score_function"),
        fixed=MEANING,
        by_topic=True,
    )
    scale: float = setting(
        1.0,
        "factor of the weights",
        range=above(0),
        aliases=("routed_scaling_factor", "route_scale", "moe_router_topk_scaling_factor"),
        fixed=MEANING,
        by_topic=True,
    )
    groups: int = setting(
        1,
        "groups of experts, of which a token takes the best",
        range=whole(1),
        aliases=("n_group", "n_routing_groups", "num_expert_groups"),
        fixed=MEANING,
        by_topic=True,
    )
    active_groups: int = setting(
        1,
        "groups of a token",
        range=whole(1),
        aliases=("topk_group", "topk_routing_group"),
        fixed=MEANING,
        by_topic=True,
    )
    router: str = setting(
        "dtype",
        "dtype of the product that gives the router's logits",
        choices=ROUTERS,
        aliases=("router_dtype", "moe_router_dtype", "float32_gate_logits"),
        by_topic=True,
    )
    balance: BalanceConfig = field(
        default_factory=BalanceConfig, metadata={"help": "terms for equal numbers of tokens"}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.count % self.groups:
            raise KeyedError(
                "groups",
                f"is {self.groups}",
                f" and count is {self.count}: groups have equally many experts, and {self.count} / {self.groups} is "
                "not a whole number.",
            )
        if self.active_groups > self.groups:
            raise KeyedError("active_groups", f"is {self.active_groups}", f", and there are {self.groups} groups.")
        if self.active > (within := self.count // self.groups * self.active_groups):
            raise KeyedError(
                "active", f"is {self.active}", f", and a token can choose among {within} experts: raise count."
            )
        if self.shared_gate and not self.shared:
            raise KeyedError("shared_gate", "is true", ", but shared is 0, so there is nothing that it weighs.")

    @property
    def Experts(self) -> Axis:
        return Axis(EXPERTS, self.count)

    @property
    def Router(self) -> Axis:
        return Axis(ROUTER, self.count)

    @property
    def Mlp(self) -> Axis:
        return Axis("mlp", self.width)
