"""From a model's configuration to its class."""

from __future__ import annotations

from typing import Any

from haliax import Axis

from gregale.model.config import GemmaConfig, LlamaConfig, ModelConfig
from gregale.model.llama import Llama

MODELS: dict[type[ModelConfig], Any] = {LlamaConfig: Llama, GemmaConfig: Llama}


def init_model(config: ModelConfig, Vocab: Axis, key):
    """The model with its initial weights; under `jax.jit` or `jax.eval_shape` nothing is made in one piece."""
    return MODELS[type(config)].init(config, Vocab, key)
