"""The Llama family written again: slow, obvious, plain arrays, one sequence and one head at a time.

It computes in the dtype of its weights, angles and losses in float32 at least.
"""

import jax
import jax.numpy as jnp
import numpy as np

from gregale.model.config import LinearScaling, Llama3Scaling, RotaryScaling
from gregale.model.llama import Llama, LlamaConfig

Weights = dict[str, jax.Array]


def plain_weights(model: Llama) -> Weights:
    """The model's arrays as plain ones, by name; arrays of layers keep their first axis."""
    blocks, attention, mlp = model.blocks, model.blocks.attention, model.blocks.mlp
    arrays = {"embedding": model.embedding, "norm": model.norm.weight, "head": model.head}
    for name in ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"):
        arrays[name] = getattr(blocks, name) and getattr(blocks, name).weight
    for name in ("query", "key", "value", "out"):
        arrays |= {name: getattr(attention, name).weight, f"{name}_bias": getattr(attention, name).bias}
    for name in ("query_norm", "key_norm"):
        arrays[name] = getattr(attention, name) and getattr(attention, name).weight
    arrays |= {name: getattr(mlp, name).weight for name in ("gate", "up", "down")}
    return {name: named.array for name, named in arrays.items() if named is not None}


def rotary_frequency(pair: int, half: int, base: float, scaling: RotaryScaling | None) -> float:
    """Radians a position of channel pair `pair`, by the cases in the description of Llama 3.1."""
    frequency = base ** (-pair / half)
    if scaling is None:
        return frequency
    if isinstance(scaling, LinearScaling):
        return frequency / scaling.factor
    assert isinstance(scaling, Llama3Scaling)
    wavelength = 2 * np.pi / frequency
    if wavelength < scaling.original_context / scaling.high_frequency_factor:
        return frequency
    if wavelength > scaling.original_context / scaling.low_frequency_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_context / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def has_window(layer: int, config: LlamaConfig) -> bool:
    return config.sliding_window is not None and layer not in config.full_layers


def rotate(x, positions, config: LlamaConfig, layer: int = 0):
    """Rotary embedding as a product of complex numbers: [position, head_size]."""
    half = x.shape[-1] // 2
    base, scaling = config.rotary_base, config.rotary_scaling
    if has_window(layer, config) and config.window_rotary_base is not None:
        base, scaling = config.window_rotary_base, None
    frequency = np.array([rotary_frequency(i, half, base, scaling) for i in range(half)])
    angles = positions[:, None] * frequency.astype(jnp.promote_types(x.dtype, jnp.float32))[None, :]
    turn = jnp.exp(1j * angles)
    turned = (x[:, :half] + 1j * x[:, half:]) * turn
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)


def rms_norm(x, weight, config: LlamaConfig):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.norm_epsilon) * (weight + config.norm_offset)


def bounded(x, cap: float | None):
    return x if cap is None else cap * jnp.tanh(x / cap)


def attention(x, w: Weights, layer: int, positions, segments, config: LlamaConfig):
    """[position, embed] -> the same, head by head."""
    length = x.shape[0]
    place = np.arange(length)
    sees = place[:, None] >= place[None, :]
    if has_window(layer, config):
        sees &= place[:, None] - place[None, :] < config.sliding_window
    sees = sees & (segments[:, None] == segments[None, :])

    def before_norm(name: str, head: int):
        projected = x @ w[name][layer, :, head]
        return projected + w[f"{name}_bias"][layer, head] if config.attention_bias else projected

    def project(name: str, head: int):
        projected = before_norm(name, head)
        if config.qk_norm and config.qk_norm_over == "heads" and name != "value":
            heads = w[name].shape[2]
            together = jnp.concatenate([before_norm(name, each) for each in range(heads)], axis=-1)
            scale = w[f"{name}_norm"][layer].reshape(-1)
            projected = jnp.split(rms_norm(together, scale, config), heads, axis=-1)[head]
        elif config.qk_norm and name != "value":
            projected = rms_norm(projected, w[f"{name}_norm"][layer], config)
        return projected

    kv_heads = config.kv_heads or config.heads
    keys = [rotate(project("key", head), positions, config, layer) for head in range(kv_heads)]
    values = [project("value", head) for head in range(kv_heads)]
    result = jnp.zeros_like(x)
    for head in range(config.heads):
        shared = head // (config.heads // kv_heads)
        query = rotate(project("query", head), positions, config, layer)
        scores = bounded(query @ keys[shared].T / (config.score_width or query.shape[-1]) ** 0.5, config.score_softcap)
        probabilities = jax.nn.softmax(jnp.where(sees, scores, -jnp.inf), axis=-1)
        result = result + probabilities @ values[shared] @ w["out"][layer, head]
    return result


def logits(w: Weights, tokens, positions, segments, config: LlamaConfig):
    """Next-token logits of one sequence: [position] -> [position, vocab]."""

    def attend(x, layer: int):
        return attention(x, w, layer, positions, segments, config)

    def feed(x, layer: int):
        gate, up = x @ w["gate"][layer], x @ w["up"][layer]
        if config.activation == "gelu":
            active = gate / 2 * (1 + jnp.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        else:
            active = gate / (1 + jnp.exp(-gate))
        return (active * up) @ w["down"][layer]

    x = w["embedding"][tokens] * (config.hidden**0.5 if config.scaled_embedding else 1)
    for layer in range(config.layers):
        for name, half in (("attention", attend), ("mlp", feed)):
            scale = w[f"{name}_norm"][layer]
            if config.norms == "after":
                x = x + rms_norm(half(x, layer), scale, config)
            elif config.norms == "before":
                x = x + half(rms_norm(x, scale, config), layer)
            else:
                x = x + rms_norm(half(rms_norm(x, scale, config), layer), w[f"{name}_out_norm"][layer], config)
    head = w["embedding"].T if config.tied_head else w["head"]
    return bounded(rms_norm(x, w["norm"], config) @ head, config.logit_softcap)


def losses(w: Weights, batch: Weights, config: LlamaConfig):
    """The next-token loss of every token, without weights: [batch, position]."""

    def one(tokens, targets, positions, segments):
        scores = logits(w, tokens, positions, segments, config)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        log_probabilities = jax.nn.log_softmax(scores, axis=-1)
        return -jnp.take_along_axis(log_probabilities, targets[:, None], axis=-1)[:, 0]

    segments = batch.get("segment_ids", jnp.zeros_like(batch["tokens"]))
    return jax.vmap(one)(batch["tokens"], batch["targets"], batch["positions"], segments)


def loss(w: Weights, batch: Weights, config: LlamaConfig):
    """(sum of masked losses, sum of the mask)."""
    return jnp.sum(losses(w, batch, config) * batch["loss_mask"]), jnp.sum(batch["loss_mask"])


def plain_batch(batch) -> Weights:
    return {name: jnp.asarray(named.array) for name, named in batch.items()}
