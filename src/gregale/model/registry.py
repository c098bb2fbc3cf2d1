"""The model class of a model configuration."""

from __future__ import annotations

from typing import Any

from haliax import Axis

from gregale.model.config import GemmaConfig, LlamaConfig, ModelConfig
from gregale.model.llama import Llama

MODELS: dict[type[ModelConfig], Any] = {LlamaConfig: Llama, GemmaConfig: Llama}


def init_model(config: ModelConfig, Vocab: Axis, key):
    """Return the model with its initial weights; under `jax.jit` or `jax.eval_shape` arrays are created in shards."""
    return MODELS[type(config)].init(config, Vocab, key)
