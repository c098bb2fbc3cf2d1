"""Causal attention by JAX's splash kernels for TPU, which store no scores and skip masked blocks."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gregale.model.kernels.kernels import ATTENTION_NAME
from gregale.model.kernels.tpu.blocks import LANES, Blocks, blocks_for


@dataclass(frozen=True)
class Splash:
    """An `Attend` for any length and any head size.

    Rows are padded to whole blocks with tokens after all others, which no token sees. The kernel names its residuals,
    output and log-sum-exp: if they are saved, it does not run again.
    """

    device_kind: str  # JAX's name of the chip, which determines the sizes of blocks
    interpret: bool = False  # runs the kernels step by step in JAX, on any device

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: jax.Array | None,
        window: int | None,
        cap: float | None = None,
    ) -> jax.Array:
        length, heads, head_size = q.shape[1:]
        blocks = blocks_for(self.device_kind, length, window, head_size)
        q = (q * head_size**-0.5).astype(q.dtype)
        q, k, v = (_filled(x, blocks.length).swapaxes(1, 2) for x in (q, k, v))
        ids = None if segments is None else _segment_ids(segments, blocks.length)
        attended: Any = jax.vmap(_kernel(blocks, heads, window, cap, self.interpret))(q, k, v, ids)
        return attended.swapaxes(1, 2)[:, :length, :, :head_size]


def _filled(x: jax.Array, length: int) -> jax.Array:
    """Pad [batch, position, heads, size] with zeros to `length`, and to whole rows of lanes if there are several."""
    size = x.shape[-1]
    more = -size % LANES if size > LANES else 0
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, more)))


def _segment_ids(segments: jax.Array, length: int):
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    ids = jnp.pad(segments, ((0, 0), (0, length - segments.shape[1])))
    return SegmentIds(q=ids, kv=ids)


def _kernel(blocks: Blocks, heads: int, window: int | None, cap: float | None, interpret: bool):
    """Return kernel(q [heads, position, size], k, v [kv_heads, position, size], segments), scores not scaled."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # Pallas takes long to import

    shape = (blocks.length, blocks.length)
    mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
    size, compute = blocks.size, blocks.compute
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            block_q=size,
            block_kv=size,
            block_kv_compute=compute,
            block_q_dkv=size,
            block_kv_dkv=blocks.backward,
            block_kv_dkv_compute=compute,
            block_q_dq=None if blocks.fused else size,
            block_kv_dq=None if blocks.fused else size,
            use_fused_bwd_kernel=blocks.fused,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=cap,
        residual_checkpoint_name=ATTENTION_NAME,
        interpret=interpret,
    )
