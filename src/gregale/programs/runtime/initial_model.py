"""Provides the model of a run before its first step, with its adapters, and what these drop in training."""

from dataclasses import replace
from typing import Any

import jax
from haliax import Axis

from gregale.axes.layout import is_named
from gregale.axes.parameters import frozen_of, holding
from gregale.model.adapter_config import LoraConfig
from gregale.model.adapters import adapted
from gregale.model.compute_config import DTYPES
from gregale.model.execution import Execution
from gregale.model.lora import hashed
from gregale.runs.config import TrainConfig


def initial_model(config: TrainConfig, Vocab: Axis, key: jax.Array) -> Any:
    """Return the model before the first step; with an adapter, frozen weights are marked, in the compute dtype."""
    if config.adapter is None:
        return config.model.init(Vocab, key)
    model = with_adapters(config, config.model.init(Vocab, key), key)
    dtype = DTYPES[config.compute.dtype]
    return holding(model, jax.tree.map(lambda weight: weight.astype(dtype), frozen_of(model), is_leaf=is_named))


def with_adapters(config: TrainConfig, model: Any, key: jax.Array) -> Any:
    """Return a model with new adapters, and with marks on its own weights."""
    assert isinstance(config.adapter, LoraConfig)
    return adapted(model, config.adapter, jax.random.fold_in(key, 1))


def dropping(config: TrainConfig, run: Execution, batch) -> Execution:
    """Return the execution of training on a batch; its tokens determine what adapters drop, so a resume repeats it."""
    if not isinstance(config.adapter, LoraConfig) or config.adapter.dropout == 0:
        return run
    return replace(run, dropout_key=jax.random.fold_in(jax.random.key(config.seed), hashed(batch["tokens"].array)))
