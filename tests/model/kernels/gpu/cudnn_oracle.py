"""What cuDNN's two operations compute, written down from JAX's description of them: they need a GPU to run."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn


@dataclass(frozen=True)
class Operation:
    """In the place of a primitive of JAX's."""

    bind: object


def stand_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cudnn, "_dot_product_attention_fwd_p", Operation(forward))
    patch.setattr(cudnn, "_dot_product_attention_bwd_p", Operation(backward))


def scores(q, k, bias, options) -> jax.Array:
    """[batch, heads, position of queries, position of keys] in float32, hidden ones minus infinity."""
    assert options["mask_type"] is cudnn.MaskType.CAUSAL
    assert options["layout"] == cudnn.AttentionLayout.BTNH.value
    length, (has_bias, has_bias_gradient) = q.shape[1], options["variadic_args"]
    assert not has_bias_gradient
    assert not has_bias or length % 2 == 0, "cuDNN's backward pass with a bias"
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    found = options["scale"] * jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
    if has_bias:
        assert bias.dtype == q.dtype
        assert bias.shape == (len(q), 1, length, length)
        found += bias.astype(jnp.float32)
    ago = jnp.arange(length)[:, None] - jnp.arange(length)
    window = options["sliding_window_length"] or length
    return jnp.where((ago >= 0) & (ago < window), found, -jnp.inf)


def forward(q, k, v, bias, *unused, is_training, **options):
    found = scores(q, k, bias, options)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    attended = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(found), v).astype(q.dtype)
    return [attended, jax.nn.logsumexp(found, axis=-1)] if is_training else [attended]


def backward(q, k, v, bias, *rest, **options):
    """By the log-sum-exp that was kept, as flash attention does it."""
    *unused, log_sum_exp, attended, gradient = rest
    assert len(unused) == 6
    group = q.shape[2] // k.shape[2]
    by_head, values = (jnp.repeat(x, group, axis=2) for x in (k, v))
    weights = jnp.exp(scores(q, k, bias, options) - log_sum_exp[..., None])
    inner = jnp.einsum("bthd,bthd->bht", gradient, attended)[..., None]
    by_score = weights * (jnp.einsum("bthd,bshd->bhts", gradient, values) - inner) * options["scale"]

    def of_group(x):
        return x.reshape(*k.shape[:3], group, -1).sum(3)

    by_key, by_value = (of_group(jnp.einsum("bhts,bthd->bshd", a, b)) for a, b in ((by_score, q), (weights, gradient)))
    return [jnp.einsum("bhts,bshd->bthd", by_score, by_head), by_key, by_value]
