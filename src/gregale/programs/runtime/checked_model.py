"""Calls of the methods of models and callbacks, which refuse what a run cannot use."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from equinox import is_array
from haliax import NamedArray

from gregale.axes.parameters import buffers_of
from gregale.errors import UserError, plugin_errors
from gregale.model.config import ModelConfig
from gregale.model.execution import Execution
from gregale.model.losses import Losses, losses_of
from gregale.objectives import NextTokenConfig, ObjectiveConfig, Passes
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
