"""One battery over every optimizer: plain optax on plain arrays is the oracle."""

from collections.abc import Mapping
from dataclasses import replace

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis, NamedArray
from optax.contrib import MuonDimensionNumbers, muon

from gregale.axes.layout import is_named
from gregale.errors import UserError
from gregale.optim import (
    AdamWConfig,
    ConstantSchedule,
    CosineSchedule,
    GroupConfig,
    LionConfig,
    MatrixAxes,
    MuonConfig,
    Optimizer,
    SgdConfig,
    decays,
    global_norm,
    matrix_axes,
)

STEPS = 6
Layers, Embed, Heads = Axis("layers", 3), Axis("embed", 8), Axis("heads", 2)
HeadSize, Mlp, Vocab = Axis("head_size", 4), Axis("mlp", 12), Axis("vocab", 16)
AXES = {
    "embedding": (Vocab, Embed),
    "query": (Layers, Embed, Heads, HeadSize),
    "query_bias": (Layers, Heads, HeadSize),
    "output": (Layers, Heads, HeadSize, Embed),
    "up": (Layers, Embed, Mlp),
    "norm": (Layers, Embed),
    "final_norm": (Embed,),
}
DECAYS = {"embedding": True, "query": True, "output": True, "up": True}
DIMENSIONS = {
    "query": MuonDimensionNumbers((1,), (2, 3)),
    "output": MuonDimensionNumbers((1, 2), (3,)),
    "up": MuonDimensionNumbers((1,), (2,)),
}
HEADS = {"query": MuonDimensionNumbers((1,), (3,)), "output": MuonDimensionNumbers((2,), (3,))}
MASK = {name: DECAYS.get(name, False) for name in AXES}
SCHEDULE = optax.join_schedules(
    [optax.linear_schedule(0.01, 0.03, 2), optax.cosine_decay_schedule(0.03, STEPS - 2)], [2]
)


class Model(eqx.Module):
    """A module that can be called, as a real model: optax calls trees that look like functions."""

    weights: dict[str, NamedArray]

    def __call__(self):
        return None


def arrays(seed: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    draw = lambda axes: random.normal(size=[axis.size for axis in axes]).astype(np.float32)  # noqa: E731
    return {name: jnp.asarray(draw(axes)) for name, axes in AXES.items()}


def model(plain: dict[str, jax.Array]) -> Model:
    return Model({name: hax.named(array, AXES[name]) for name, array in plain.items()})


def plain(model: Model) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf.array) for name, leaf in model.weights.items()}


SCHEDULED = {"learning_rate": 0.03, "schedule": CosineSchedule(warmup=2, final=0.0)}
SETTINGS = {**SCHEDULED, "weight_decay": 0.2, "clip_norm": 5.0}


def clipped(*transformations):
    return optax.chain(optax.clip_by_global_norm(5.0), *transformations)


def plain_muon(matrices=DIMENSIONS, **settings):
    oracle = muon(
        SCHEDULE,
        weight_decay=0.2,
        adam_weight_decay=0.2,
        weight_decay_mask=None,
        adam_b1=0.9,
        adam_b2=0.95,
        muon_weight_dimension_numbers={name: matrices.get(name) for name in AXES},
        **settings,
    )
    return clipped(oracle)


NESTEROV = {"momentum": 0.9, "nesterov": True}
DECAY = optax.add_decayed_weights(0.2, MASK), optax.scale_by_learning_rate(SCHEDULE)
CASES = {
    "adamw": (AdamWConfig(**SETTINGS), clipped(optax.adamw(SCHEDULE, b1=0.9, b2=0.95, weight_decay=0.2, mask=MASK))),
    "adamw, no clipping, all decay": (
        AdamWConfig(**SETTINGS | {"clip_norm": None}, decay="all", betas=(0.8, 0.9), epsilon=1e-3),
        optax.adamw(SCHEDULE, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.2),
    ),
    "lion": (LionConfig(**SETTINGS), clipped(optax.lion(SCHEDULE, b1=0.9, b2=0.99, weight_decay=0.2, mask=MASK))),
    "sgd": (SgdConfig(**SETTINGS | {"weight_decay": 0.0}, momentum=0.0), clipped(optax.sgd(SCHEDULE))),
    "sgd, nesterov, decay": (SgdConfig(**SETTINGS | NESTEROV), clipped(optax.trace(0.9, nesterov=True), *DECAY)),
    "sgd, momentum that rises": (
        SgdConfig(**SETTINGS | NESTEROV, momentum_warmup=3),
        clipped(
            optax.inject_hyperparams(optax.trace)(decay=lambda step: 0.9 * jnp.minimum(1, step / 3), nesterov=True),
            *DECAY,
        ),
    ),
    "the outer optimizer of DiLoCo": (
        SgdConfig(learning_rate=0.7, schedule=ConstantSchedule(), clip_norm=None, **NESTEROV),
        optax.sgd(0.7, **NESTEROV),
    ),
    "muon": (MuonConfig(**SETTINGS, decay="all"), plain_muon(consistent_rms=0.2)),
    "muon, scaled by shape": (MuonConfig(**SETTINGS, decay="all", rms=None), plain_muon()),
    "muon, a matrix a head": (
        MuonConfig(**SETTINGS, decay="all", heads=True),
        plain_muon(DIMENSIONS | HEADS, consistent_rms=0.2),
    ),
    "muon, no nesterov, AdamW at its own rate and for two matrices": (
        MuonConfig(**SETTINGS, decay="all", nesterov=False, adamw_learning_rate=0.06, adamw="*up|*query", iterations=3),
        plain_muon(
            {"output": DIMENSIONS["output"]},
            consistent_rms=0.2,
            nesterov=False,
            ns_steps=3,
            adam_learning_rate=lambda step: 2 * SCHEDULE(step),
        ),
    ),
}
EVERY_CASE = pytest.mark.parametrize(("config", "oracle"), CASES.values(), ids=CASES.keys())
KINDS = "adamw", "lion", "sgd, nesterov, decay", "muon"
EVERY_KIND = pytest.mark.parametrize("config", [CASES[kind][0] for kind in KINDS], ids=KINDS)


def run(optimizer, parameters, gradients):
    """Parameters after each step; one compiled step."""
    state = jax.jit(optimizer.init)(parameters)

    @jax.jit
    def step(parameters, state, gradient):
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state

    history = []
    for gradient in gradients:
        parameters, state = step(parameters, state, gradient)
        history.append(parameters)
    return history


@EVERY_CASE
def test_every_step_equals_plain_optax(config, oracle):
    parameters, gradients = arrays(0), [arrays(1 + step) for step in range(STEPS)]
    optimizer = config.build(model(parameters), STEPS)
    found = run(optimizer.whole(), model(parameters), [model(gradient) for gradient in gradients])
    expected = run(oracle, parameters, gradients)
    for ours, theirs in zip(found, expected, strict=True):
        for name, array in plain(ours).items():
            np.testing.assert_allclose(array, theirs[name], rtol=1e-6, atol=1e-6, err_msg=name)


def by_layer(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of each layer apart, by the names that groups match."""
    stacked = {name for name, axes in AXES.items() if axes[0] is Layers}
    found = {name: np.asarray(array) for name, array in arrays.items()}
    layers = {f"layer.{i}.{name}": found[name][i] for name in stacked for i in range(Layers.size)}
    return {name: array for name, array in found.items() if name not in stacked} | layers


def in_groups(limit: float | None = None):
    """AdamW and SGD by `optax.multi_transform`: rates and decays by the names of single layers."""

    def label(name: str) -> str:
        if name.endswith("norm"):
            return "norms"
        return "second" if name.startswith("layer.1.") else "others"

    def one(factor: float, decay: float):
        rate = optax.scale_by_learning_rate(lambda step: factor * SCHEDULE(step))
        decayed = {name: name.rpartition(".")[2] in DECAYS or decay != 0.2 for name in by_layer(arrays(0))}
        return optax.chain(optax.add_decayed_weights(decay, decayed), rate)

    labels = {name: label(name) for name in by_layer(arrays(0))}
    groups = optax.multi_transform({"norms": one(0.1, 0.0), "second": one(0.5, 0.3), "others": one(1.0, 0.2)}, labels)
    limited = optax.identity() if limit is None else optax.clip_by_global_norm(limit)
    return clipped(optax.scale_by_adam(0.9, 0.95), limited, groups)


GROUPS = (
    GroupConfig("*norm", learning_rate=0.1, weight_decay=0.0),
    GroupConfig("layer.1.*|nothing", learning_rate=0.5, weight_decay=0.3),
)


@pytest.mark.parametrize("limit", [None, 3.0])
def test_groups_equal_multi_transform_with_every_layer_apart(limit):
    parameters, gradients = arrays(0), [arrays(1 + step) for step in range(STEPS)]
    config = AdamWConfig(**SETTINGS, betas=(0.9, 0.95), groups=GROUPS, clip_update_norm=limit)
    found = run(config.build(model(parameters), STEPS).whole(), model(parameters), [model(each) for each in gradients])
    expected = run(in_groups(limit), by_layer(parameters), [by_layer(each) for each in gradients])
    for ours, theirs in zip(found, expected, strict=True):
        for name, array in by_layer(plain(ours)).items():
            np.testing.assert_allclose(array, theirs[name], rtol=2e-6, atol=1e-6, err_msg=name)


def test_groups_of_muon_scale_matrices_and_others():
    parameters, gradients = arrays(0), [arrays(1), arrays(2)]
    own = {"weight_decay": 0.2, "learning_rate": 0.5}
    whole, half = MuonConfig(**SETTINGS, decay="all"), MuonConfig(**SETTINGS, groups=(GroupConfig("*", **own),))
    first, second = (
        run(config.build(model(parameters), STEPS).whole(), model(parameters), [model(each) for each in gradients[:1]])
        for config in (whole, half)
    )
    for name, array in plain(second[0]).items():
        moved, moved_half = plain(first[0])[name] - parameters[name], array - parameters[name]
        np.testing.assert_allclose(moved_half, 0.5 * moved, rtol=1e-3, atol=1e-6, err_msg=name)


def test_a_group_without_parameters_is_refused():
    config = AdamWConfig(groups=(GroupConfig("layer.*"), GroupConfig("layers.*|head")))
    with pytest.raises(UserError, match=r"groups\.1\.match.* 'layers\.\*\|head', and no parameter .* 17 names: "):
        config.build(model(arrays(0)), STEPS)
    with pytest.raises(UserError, match="Muon's directions follows from shapes"):
        MuonConfig(clip_update_norm=1.0)
    with pytest.raises(UserError, match=r"adamw is 'layer\.0\.up', which has layer\.0\.up, and not the same array"):
        MuonConfig(adamw="layer.0.up").build(model(arrays(0)), STEPS)
    with pytest.raises(UserError, match=r"adamw is '\*embedding', and no parameter .* 9 names: "):
        MuonConfig(adamw="*embedding").build(model(arrays(0)), STEPS)


def test_the_battery_tells_a_wrong_momentum():
    config, oracle = CASES["sgd, nesterov, decay"]
    parameters, gradients = arrays(0), [arrays(1), arrays(2)]
    wrong = replace(config, momentum=0.89).build(parameters, STEPS).whole()
    difference = run(wrong, parameters, gradients)[-1]["up"] - run(oracle, parameters, gradients)[-1]["up"]
    assert jnp.abs(difference).max() > 1e-5


@EVERY_KIND
def test_what_is_not_trained_is_passed_over(config):
    whole = {"named": hax.ones((Embed, Mlp)), "plain": jnp.ones((4, 3)), "vector": jnp.ones(3)}
    whole |= {"function": jax.nn.relu, "count": 3, "none": None}
    abstract = eqx.filter_eval_shape(lambda: whole)
    trained = eqx.filter(whole, eqx.is_inexact_array)
    optimizer = config.build(abstract, STEPS).whole()
    updates, _ = jax.eval_shape(optimizer.update, trained, jax.eval_shape(optimizer.init, trained), trained)
    assert jax.tree.structure(updates) == jax.tree.structure(trained)


@EVERY_KIND
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtype_and_axes_are_kept_and_state_can_be_sharded_like_the_parameters(config, dtype):
    parameters = jax.tree.map(lambda array: array.astype(dtype), model(arrays(0)))
    optimizer = config.build(parameters, STEPS)
    described = jax.eval_shape(lambda: parameters)
    for part in (optimizer.sharded, optimizer.gathered):
        state = jax.eval_shape(part.init, described)
        updates, after = jax.eval_shape(part.update, described, state, described)
        assert jax.tree.structure(updates) == jax.tree.structure(described)
        assert [leaf.dtype for leaf in jax.tree.leaves(updates)] == [dtype] * len(AXES)
        assert after == state
        for leaf in jax.tree.leaves(state, is_leaf=is_named):
            in_shards = part is optimizer.sharded and is_named(leaf)
            assert leaf.axes in AXES.values() if in_shards else leaf.shape == (), "the gathered part holds scalars only"


def test_the_sharded_part_of_muon_multiplies_no_matrices():
    parameters = model(arrays(0))
    optimizer = MuonConfig().build(parameters, STEPS)
    texts = {
        name: str(jax.make_jaxpr(part.update)(parameters, part.init(parameters), parameters))
        for name, part in (("sharded", optimizer.sharded), ("gathered", optimizer.gathered))
    }
    assert "dot_general" not in texts["sharded"]
    assert "dot_general" in texts["gathered"]


def test_a_norm_that_is_known_is_not_taken_again():
    parameters, gradient = model(arrays(0)), model(arrays(1))
    optimizer = SgdConfig(learning_rate=1.0, schedule=ConstantSchedule(), momentum=0.0).build(parameters, STEPS).sharded
    state = optimizer.init(parameters)
    itself, _ = optimizer.update(gradient, state, parameters)
    given, _ = optimizer.update(gradient, state, parameters, gradient_norm=global_norm(gradient))
    np.testing.assert_array_equal(itself.weights["up"].array, given.weights["up"].array)
    np.testing.assert_allclose(global_norm(itself), 1.0, rtol=1e-6)
    text = str(jax.make_jaxpr(lambda g, n: optimizer.update(g, state, parameters, gradient_norm=n))(gradient, 3.0))
    assert "reduce_sum" not in text


def test_a_small_gradient_is_not_clipped_and_zero_stays_zero():
    parameters = {"w": jnp.array([0.3, 0.4])}
    optimizer = SgdConfig(learning_rate=1.0, schedule=ConstantSchedule(), momentum=0.0).build(parameters, STEPS).sharded
    for gradient in (parameters, {"w": jnp.zeros(2)}):
        updates, _ = optimizer.update(gradient, optimizer.init(parameters), parameters)
        np.testing.assert_array_equal(updates["w"], -gradient["w"])


def test_the_norm_is_summed_in_float32():
    tree = {"a": jnp.full(1000, 1.0, jnp.bfloat16), "b": jnp.full(24, 1.0, jnp.bfloat16)}
    norm = global_norm(tree)
    assert norm.dtype == jnp.float32
    assert norm == 32.0


def test_the_learning_rate_can_be_reported():
    optimizer = AdamWConfig(**SETTINGS).build(model(arrays(0)), STEPS)
    np.testing.assert_allclose([optimizer.learning_rate(t) for t in range(STEPS)], [SCHEDULE(t) for t in range(STEPS)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamWConfig(decay="some"), "decay is 'some'. Valid choices: matrices, all"),
        (lambda: AdamWConfig(clip_norm=0.0), "clip_norm is 0"),
        (lambda: AdamWConfig(betas=(0.9, 1.0)), r"betas\.1 is 1;"),
        (lambda: SgdConfig(momentum=1.0), "momentum is 1"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_any_optax_transformation_is_an_optimizer_without_a_rate_that_is_known():
    assert jnp.isnan(Optimizer.of(optax.sgd(0.5)).learning_rate(3))


@pytest.mark.parametrize(
    ("names", "sides", "decay"),
    [
        ("layers mlp embed", MatrixAxes(("mlp",), ("embed",)), True),
        ("embed layers heads head_size", MatrixAxes(("embed",), ("heads", "head_size")), True),
        ("embed vocab", None, True),
    ],
)
def test_named_parameters_are_judged_by_their_axes_in_any_order(names, sides, decay):
    named = hax.zeros(tuple(Axis(name, 2) for name in names.split()))
    assert matrix_axes(named) == sides
    assert decays(named) == decay


@pytest.mark.parametrize(
    ("shape", "matrix", "decay"), [((3, 4), True, True), ((3,), False, False), ((2, 3, 4), False, True)]
)
def test_plain_arrays_are_judged_by_their_rank(shape, matrix, decay):
    assert (matrix_axes(jnp.zeros(shape)) is not None) == matrix
    assert decays(jnp.zeros(shape)) == decay
