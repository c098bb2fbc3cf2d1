"""The configuration of a model's computation."""

from dataclasses import dataclass

import jax.numpy as jnp

from gregale.settings import Settings, setting, whole

REMAT = ("none", "full", "context", "context_offload", "projections", "offload")
RULES = ("auto", "plain")
ATTENTION = ("auto", "splash", "cudnn", "xla")
MATMUL = ("dtype", "int8", "fp8")
CompilerOptions = dict[str, bool | int | float | str]
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
GATHER = ("per_layer", "per_step")


@dataclass(frozen=True)
class ComputeConfig(Settings):
    """The computation of a model; it changes the results only by rounding, `matmul` by that to 8 bits."""

    dtype: str = setting(
        "bfloat16",
        "dtype of activations and gathered weights",
        choices=tuple(DTYPES),
        aliases=("precision", "mixed_precision", "torch_dtype", "bf16", "fp16", "model.dtype"),
    )
    matmul: str = setting(
        "dtype",
        "numbers of the layers' linear products",
        choices=MATMUL,
        aliases=("quantization", "quant", "quantize", "fp8"),
    )
    gather: str = setting("per_layer", "weights over data: ZeRO-3, or kept", choices=GATHER)
    remat: str = setting(
        "full",
        "what a layer saves for its backward pass",
        choices=REMAT,
        aliases=("activation_checkpointing", "checkpointing", "recompute"),
    )
    unroll: int | None = setting(None, "layers unrolled; null: by backend", range=whole(1))
    autodiff_rules: str = setting("auto", "rules of differentiation; auto: the platform's", choices=RULES)
    attention: str = setting(
        "auto",
        "attention; auto: the fastest that fits",
        choices=ATTENTION,
        aliases=("attn_implementation", "flash_attention", "attention_backend", "attn", "model.attention"),
    )
    loss_block: int = setting(1024, "tokens whose logits are held at a time", range=whole(1))
    compiler_options: CompilerOptions = setting(dict, "XLA's own options")
