"""Provides the model of a run before its first step, with its adapters, and what these drop in training.

Also calls of the methods of models and callbacks, which refuse what a run cannot use.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from equinox import is_array
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH, is_named
from gregale.axes.parameters import buffers_of, is_buffer, is_parameter, position_order, trainable
from gregale.errors import UserError, plugin_errors
from gregale.model.adapters import adapted, hashed, quantised
from gregale.model.config import DTYPES, ModelConfig
from gregale.model.execution import Execution
from gregale.model.losses import Losses, losses_of
from gregale.objectives import NextTokenConfig, ObjectiveConfig, Passes
from gregale.runs.config import TrainConfig
from gregale.tracking.callback import Callback, CallbackConfig, own_metrics
from gregale.tracking.metrics import metric_of

NEXT_TOKEN = NextTokenConfig()


def checked_loss(
    config: ModelConfig, model, batch, run: Execution, objective: ObjectiveConfig = NEXT_TOKEN, frozen: Any = None
) -> Losses:
    """Return the loss of a model; raise `UserError` if a plugin's model or objective does not return scalars.

    - `frozen`: as in `Passes`
    """
    what, owner = f"model.type {config.get_choice_name(type(config))}: {type(model).__name__}.loss", type(model)
    if not objective.is_models_own:
        owner = type(objective)
        what = f"objective.type {objective.get_choice_name(owner)}: {owner.__name__}.loss"
    with plugin_errors(what, owner):
        found = objective.loss(Passes(model, batch, run, config.logit_rows, frozen))
    pair = isinstance(found, tuple) and [jnp.shape(each) for each in found[:2] if is_array(each)] == [(), ()]
    if not pair or not (isinstance(found, Losses) or len(found) == 2):
        raise UserError(
            f"{what} has to return two scalar arrays, the sum of losses and the sum of weights "
            "(`hax.sum(...).scalar()`), or `gregale.model.losses.Losses` of them."
        )
    losses = losses_of(found)
    if twice := losses.auxiliary.keys() & losses.metrics.keys():
        raise UserError(f"{what}: auxiliary and metrics both have {min(twice)!r}; rename one of them.")
    for name, value in losses.named.items():
        if metric_of(name) is not None:
            raise UserError(f"{what}: {name!r} is the name of another metric; choose another.")
        if jnp.shape(value) != ():
            raise UserError(f"{what}: {name!r} has the shape {jnp.shape(value)}; it has to be a scalar, a sum.")
    return losses


def updated_buffers(config: ModelConfig, model, statistics: dict[str, NamedArray], weight: jax.Array):
    """Return a model with new buffers; raise `UserError` if a plugin's model does not return arrays as before."""
    what = f"model.type {config.get_choice_name(type(config))}: {type(model).__name__}.update_buffers"
    with plugin_errors(what, type(model)):
        updated = model.update_buffers(statistics, weight)
    before, after = (jax.eval_shape(buffers_of, each) for each in (model, updated))
    if before != after:
        raise UserError(f"{what} has to return the model with buffers of the axes and dtypes that they had.")
    return updated


def callback_metrics(callbacks: Sequence[Callback], model, batch, run: Execution) -> dict[str, jax.Array]:
    """Return the metrics of callbacks as float32 scalars; raise `UserError` for a name that two of them give."""
    found: dict[str, jax.Array] = {}
    for callback in callbacks:
        for name, value in own_metrics(callback, "metrics", model, batch, run).items():
            if name in found:
                raise UserError(f"callbacks: two callbacks give the metric {name!r}; rename one of them.")
            found[name] = jnp.asarray(value, jnp.float32)
    return found


def built(config: CallbackConfig) -> Callback:
    """Return the callback of a configuration; raise `UserError` if a plugin's `build` fails."""
    what = f"callbacks: {type(config).__name__}.build"
    with plugin_errors(what, type(config)):
        callback = config.build()
    if not isinstance(callback, Callback):
        raise UserError(f"{what} returns {type(callback).__name__}; it has to return a Callback.")
    return callback


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
