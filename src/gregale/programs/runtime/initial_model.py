"""Provides the model of a run before its first step, with its adapters, and what these drop in training."""

from dataclasses import replace
from typing import Any

import jax
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH, is_named
from gregale.axes.parameters import is_buffer, is_parameter, position_order, trainable
from gregale.model.adapters import adapted, hashed, quantised
from gregale.model.config import DTYPES
from gregale.model.execution import Execution
from gregale.runs.config import TrainConfig


def base_model(config: TrainConfig, Vocab: Axis, key: jax.Array) -> Any:
    """Return the model without adapters; beside adapters its weights are in the compute dtype."""
    model, dtype = config.model.init(Vocab, key), DTYPES[config.compute.dtype]
    if config.adapter is None:
        return model

    def cast(leaf):
        return leaf.astype(dtype) if is_parameter(leaf.array if is_named(leaf) else leaf) else leaf

    return jax.tree.map(cast, model, is_leaf=lambda leaf: is_named(leaf) or is_buffer(leaf))


def stored_base(config: TrainConfig, Vocab: Axis, key: jax.Array) -> Any:
    """Return the model without adapters in the form in which devices hold it, by `adapter.base`."""
    model = base_model(config, Vocab, key)
    return model if config.adapter is None else quantised(model, config.adapter.base)


def initial_model(config: TrainConfig, Vocab: Axis, key: jax.Array) -> Any:
    """Return the model before the first step; beside adapters its own weights are marked as frozen."""
    model = stored_base(config, Vocab, key)
    return model if config.adapter is None else with_adapters(config, model, key)


def with_adapters(config: TrainConfig, model: Any, key: jax.Array) -> Any:
    """Return a model with new adapters, and with marks on its own weights."""
    assert config.adapter is not None
    return adapted(model, config.adapter, jax.random.fold_in(key, 1))


def reference(config: TrainConfig, model: Any) -> Any:
    """Return the abstract parameters of the objective's frozen copy of a model; None: it needs none."""
    if config.adapter is not None or not config.objective.needs_reference:
        return None
    dtype = DTYPES[config.compute.dtype]
    return jax.eval_shape(lambda own: jax.tree.map(lambda leaf: leaf.astype(dtype), own), trainable(model))


def dropping(config: TrainConfig, run: Execution, batch) -> Execution:
    """Return the execution of training on a batch; a row's tokens determine what adapters drop of it.

    So a resume repeats it, and other rows beside it, microbatches, stages or replicas, do not change it.
    """
    if config.adapter is None or config.adapter.dropout == 0:
        return run
    tokens, seed = batch["tokens"].rearrange((BATCH, ...)).array, jax.random.key(config.seed)
    order = position_order(tokens.shape[1], run.layout.context)
    keys = jax.vmap(lambda row: jax.random.fold_in(seed, hashed(row, order)))(tokens)
    return replace(run, dropout_keys=NamedArray(keys, (BATCH,)))
