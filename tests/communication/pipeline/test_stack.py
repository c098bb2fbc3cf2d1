"""The pipelined stack of a toy layer against a plain loop over its layers on one device."""

from functools import cache

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from jax.ad_checkpoint import checkpoint_name

from gregale.axes.layout import BATCH, LAYERS
from gregale.communication.pipeline import Pipeline, Schedule, pipelined
from gregale.errors import UserError
from tests.mesh.support import layout_of, placed

Embed, Out, Position = Axis("embed", 24), Axis("out", 24), Axis("position", 3)  # 24: for 3 or 4 stages x data 2

# S, M, R, layers per stage, F; tests/mesh/test_pipeline.py has (4, 8, 3, 2, 2) with each way to gather weights.
CASES = [(2, 2, 1, 1, 1), (3, 3, 2, 1, 1), (3, 9, 3, 1, 2)]
TOLERANCE = 1e-5


def toy_layer(x: NamedArray, weights: dict, extras: dict) -> tuple[NamedArray, dict[str, NamedArray]]:
    """tanh(x W + b + place) where the row's segment says so, else x: it is not linear, and extras matter.

    Its sums over rows are those of the squares of tanh.
    """
    hidden = hax.dot(x, weights["matrix"], axis="embed").rename({"out": "embed"})
    hidden = NamedArray(checkpoint_name(hidden.array, "hidden"), hidden.axis_names)
    new = hax.tanh(hidden + weights["bias"] + 0.1 * extras["positions"])
    sums = {"squares": hax.sum(hax.square(new), (BATCH, "position"))}
    return hax.where(extras["segment_ids"] > 0, new, 0.5 * x + 0.1 * new), sums


@cache
def problem(layers: int, rows: int):
    """Weights, inputs, extras and the weights of the outputs in the loss, as NumPy arrays."""
    generator = np.random.default_rng(layers * 100 + rows)
    Layers, Rows = Axis(LAYERS, layers), Axis(BATCH, rows)

    def normal(*axes, scale=1.0):
        return hax.named((generator.normal(size=[a.size for a in axes]) * scale).astype(np.float32), axes)

    weights = {"matrix": normal(Layers, Embed, Out, scale=0.3), "bias": normal(Layers, Embed)}
    extras = {
        "positions": hax.named(generator.integers(0, 9, (rows, Position.size), np.int32), (Rows, Position)),
        "segment_ids": hax.named(generator.integers(0, 2, (rows, Position.size), np.int32), (Rows, Position)),
    }
    return weights, normal(Rows, Position, Embed), extras, normal(Rows, Position, Embed)


def plain(weights, inputs, extras):
    """The same in plain arrays, one layer after the other."""
    positions, segments = (extras[name].array[..., None] for name in ("positions", "segment_ids"))

    def layer(x, weights):
        new = jnp.tanh(x @ weights["matrix"] + weights["bias"] + 0.1 * positions)
        return jnp.where(segments > 0, new, 0.5 * x + 0.1 * new), jnp.square(new).sum((0, 1))

    arrays = {name: leaf.array for name, leaf in weights.items()}
    x, squares = jax.lax.scan(layer, inputs.array, arrays)
    return NamedArray(x, inputs.axis_names), {"squares": NamedArray(squares, (LAYERS, "embed"))}


def loss_of(stack):
    def loss(weights, inputs, extras, factors):
        found, sums = stack(weights, inputs, extras)
        squares = sums["squares"].rearrange((LAYERS, "embed")).array
        by_layer = 1 + jnp.arange(squares.shape[0])[:, None]
        return jnp.sum((found * factors).array) + 0.01 * jnp.sum(squares * by_layer)

    return jax.value_and_grad(loss, argnums=(0, 1))


@cache
def expected(layers: int, rows: int):
    return jax.device_get(jax.jit(loss_of(plain))(*problem(layers, rows)))


def stack_of(pipeline: Pipeline):
    return lambda weights, inputs, extras: pipelined(toy_layer, weights, inputs, extras, pipeline)


def arguments_of(pipeline: Pipeline, layers_per_stage: int):
    """Weights, inputs, extras and factors on the mesh, with two rows of a microbatch on each device."""
    schedule, layout = pipeline.schedule, pipeline.layout
    layers = schedule.stages * schedule.repeats * layers_per_stage
    weights, *rest = problem(layers, 2 * layout.mesh.shape["data"] * schedule.microbatches)
    return placed(weights, layout, layout.params), *placed(tuple(rest), layout, layout.compute)


def pipeline_of(S: int, M: int, R: int, F: int = 1, **options) -> Pipeline:
    return Pipeline(Schedule(S, M, R, F), layout_of(stage=S, data=2), **options)


def assert_equals_plain(found, layers: int, rows: int) -> None:
    (value, (weights, inputs)), (exact, (exact_weights, exact_inputs)) = jax.device_get(found), expected(layers, rows)
    np.testing.assert_allclose(value, exact, rtol=TOLERANCE, atol=TOLERANCE)
    for name, gradient in exact_weights.items():
        np.testing.assert_allclose(weights[name].array, gradient.array, atol=TOLERANCE, err_msg=name)
    np.testing.assert_allclose(inputs.array, exact_inputs.array, atol=TOLERANCE)
    by_layer = np.abs(weights["matrix"].array).sum(axis=(1, 2))
    assert np.all(by_layer > 1e-3), "every layer, so every [repeat, stage], has a gradient"


@pytest.mark.parametrize(("S", "M", "R", "per_stage", "F"), CASES)
def test_pipelined_equals_a_plain_loop(S, M, R, per_stage, F):
    pipeline = pipeline_of(S, M, R, F)
    found = jax.jit(loss_of(stack_of(pipeline)))(*arguments_of(pipeline, per_stage))
    assert_equals_plain(found, S * R * per_stage, 4 * M)


def test_what_is_kept_by_name_changes_no_number():
    pipeline = pipeline_of(3, 6, 2, 2, saved=("hidden",))
    found = jax.jit(loss_of(stack_of(pipeline)))(*arguments_of(pipeline, 2))
    assert_equals_plain(found, 12, 24)


def dropout_layer(x: NamedArray, weights: dict, extras: dict) -> tuple[NamedArray, None]:
    """x / 2 + drop(tanh(x W)), twice as large in some layers; rows draw by their keys and the layer's number."""

    def draw(key):
        return jax.random.bernoulli(jax.random.fold_in(key, weights["number"].scalar()), 0.5, x.array.shape[1:])

    new = hax.tanh(hax.dot(x, weights["matrix"], axis="embed").rename({"out": "embed"}))
    dropped = hax.where(NamedArray(jax.vmap(draw)(extras["keys"].array), x.axis_names), new, 0)
    return 0.5 * x + hax.where(weights["doubled"], 2 * dropped, dropped), None


def test_layers_have_constants_and_rows_their_dropout_keys():
    layers, rows = 4, 8
    pipeline = pipeline_of(2, 4, 2, 2)
    weights, inputs, _, factors = problem(layers, rows)
    constants = {"number": hax.arange(Axis(LAYERS, layers)), "doubled": hax.arange(Axis(LAYERS, layers)) % 3 == 1}
    extras = {"keys": NamedArray(jax.random.split(jax.random.key(0), rows), (BATCH,))}

    def pipelined_loss(matrix, inputs):
        found, _ = pipelined(dropout_layer, {"matrix": matrix, **constants}, inputs, extras, pipeline)
        return jnp.sum((found * factors).array)

    def plain_loss(matrix, x):
        for number in range(layers):
            own = jax.vmap(lambda key: jax.random.fold_in(key, number))(extras["keys"].array)  # noqa: B023
            drawn = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.array.shape[1:]))(own)  # noqa: B023
            new = jnp.where(drawn, jnp.tanh(x.array @ matrix.array[number]), 0)
            x = NamedArray(0.5 * x.array + (2 * new if number % 3 == 1 else new), x.axis_names)
        return jnp.sum((x * factors).array)

    found = jax.jit(jax.value_and_grad(pipelined_loss, argnums=(0, 1)))(weights["matrix"], inputs)
    exact = jax.jit(jax.value_and_grad(plain_loss, argnums=(0, 1)))(weights["matrix"], inputs)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE)


def test_rows_that_the_microbatches_do_not_divide_are_refused():
    pipeline = pipeline_of(2, 4, 1)
    weights, inputs, extras, _ = problem(2, 12)
    with pytest.raises(UserError, match=r"pipeline.microbatches is 4: the 12 rows .* 2 .* 4 = 8 .* 1.5 .* 8 or 16"):
        pipelined(toy_layer, weights, inputs, extras, pipeline)


def test_layers_that_the_stages_do_not_divide_are_refused():
    with pytest.raises(UserError, match=r"model\.layers is 3"):
        pipelined(toy_layer, *problem(3, 16)[:3], pipeline_of(2, 4, 1))
