"""Every rule of differentiation against the plain form: values and gradients, in float32 and bfloat16."""

from itertools import product

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from haliax.nn import Linear

from gregale.model.kernels.blocked import CPU_ROWS, Blocks
from gregale.model.kernels.cpu import cpu_kernels
from gregale.model.layers import linear
from tests.model.kernels.forms import assert_equal, value_and_gradients

CPU = cpu_kernels()
Batch, Position = Axis("batch", 2), Axis("position", 6)
Embed, Mlp, Heads, HeadSize = Axis("embed", 8), Axis("mlp", 24), Axis("heads", 3), Axis("head_size", 4)

each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])


def normal(seed: int, *axes: Axis):
    return hax.random.normal(jax.random.key(seed), axes)


def assert_rule(form, arguments: tuple, dtype) -> None:
    assert_equal(form, CPU, arguments, dtype)


@each_dtype
@pytest.mark.parametrize(
    ("In", "Out", "bias"),
    [
        ((Embed,), (Mlp,), False),
        ((Mlp,), (Embed,), False),
        ((Embed,), (Heads, HeadSize), True),
        ((Heads, HeadSize), (Embed,), False),
    ],
    ids=["widening", "narrowing", "heads", "out"],
)
def test_projections(In, Out, bias, dtype):
    layer = linear(In, Out, 1.0, jax.random.key(0), bias=bias)
    assert_rule(
        lambda kernels: lambda weight, bias, x: kernels.project(Linear(weight, bias, In, Out), x),
        (layer.weight, layer.bias, normal(1, Batch, Position, *In)),
        dtype,
    )


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
@each_dtype
def test_gated_activations(name, dtype):
    gate, up = (4 * normal(seed, Batch, Position, Mlp) for seed in (0, 1))
    assert_rule(lambda kernels: getattr(kernels, name), (gate, up.rearrange((Mlp, Batch, Position))), dtype)


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gated_activations_are_finite_far_out(name):
    far = hax.named(jnp.array([-1e4, -100.0, 100.0, 1e4]), "mlp")
    for array in value_and_gradients(getattr(CPU, name), (far, far)):
        assert np.isfinite(array).all()


@each_dtype
def test_rms_norm(dtype):
    assert_rule(
        lambda kernels: lambda x, weight: kernels.rms_norm(x, weight, 1e-3),
        (3 * normal(0, Batch, Position, Embed), normal(1, Embed)),
        dtype,
    )


# A length that is no multiple of its blocks, and windows that end inside of a block and before it.
LONG = 4 * CPU_ROWS - 1
CASES = [
    (2 * CPU_ROWS + 3, None, (2, 2), False),
    (LONG, None, (6, 2), True),
    (LONG, CPU_ROWS + 9, (4, 2), False),
    (7, 3, (2, 2), True),
]


@pytest.mark.parametrize(
    ("length", "window", "heads", "packed", "dtype"),
    [*((*case, jnp.float32) for case in CASES), (*CASES[2], jnp.bfloat16)],
)
def test_attention(length, window, heads, packed, dtype):
    q, k, v = (
        2 * jax.random.normal(jax.random.key(seed), (2, length, count, 4))
        for seed, count in enumerate((heads[0], heads[1], heads[1]))
    )
    segments = jnp.cumsum(jax.random.bernoulli(jax.random.key(3), 0.02, (2, length)), axis=1) if packed else None

    def form(kernels):
        return lambda q, k, v: kernels.attend(q, k, v, segments, window)

    assert_rule(form, (q, k, v), dtype)


def test_attention_with_capped_scores():
    length = 2 * CPU_ROWS + 3
    q, k, v = (2 * jax.random.normal(jax.random.key(seed), (1, length, 2, 4)) for seed in range(3))
    segments = (jnp.arange(length) > 40).astype(int)[None]
    assert_rule(lambda kernels: lambda q, k, v: kernels.attend(q, k, v, segments, 50, 1.5), (q, k, v), jnp.float32)


def test_attention_with_sinks():
    length = 2 * CPU_ROWS + 3
    q, k, v = (
        2 * jax.random.normal(jax.random.key(seed), (2, length, heads, 4)) for seed, heads in enumerate((4, 2, 2))
    )
    sinks = 3 * jax.random.normal(jax.random.key(4), (2, length, 4, 1))
    segments = jnp.broadcast_to(jnp.arange(length) > 40, (2, length)).astype(int)

    def form(kernels):
        return lambda q, k, v, sinks: kernels.attend(q, k, v, segments, 50, None, sinks.astype(jnp.float32))

    assert_rule(form, (q, k, v, sinks), jnp.float32)
    without = CPU.attend(q, k, v, segments, 50)
    np.testing.assert_allclose(CPU.attend(q, k, v, segments, 50, None, sinks - 1e4), without, rtol=1e-6)
    assert not np.any(CPU.attend(q, k, v, segments, 50, None, sinks + 1e4))


def test_pairs_of_blocks_are_those_with_visible_scores_once():
    for length, window in product([1, CPU_ROWS, 2 * CPU_ROWS + 1, 1003], [None, 1, 50, 10_000]):
        blocks = Blocks.of_sequence(length, CPU_ROWS, window)
        assert blocks.size <= CPU_ROWS
        assert length <= blocks.size * blocks.count < length + blocks.count
        places = np.arange(blocks.size * blocks.count)
        back = places[:, None] - places
        seen = (back >= 0) & (back < (window or length + blocks.count))
        tiles = seen.reshape(blocks.count, blocks.size, blocks.count, blocks.size).any((1, 3))
        found = blocks.pairs()[0]
        np.testing.assert_array_equal(found[:, :2], np.argwhere(tiles))
        np.testing.assert_array_equal(found[:, 2:], found[:, :2] * blocks.size)


def test_rules_under_vmap_scan_and_remat():
    """As replicas, stages and layers use them: a rule is differentiated inside of each."""
    layer = linear((Embed,), (Mlp,), 1.0, jax.random.key(0))
    down = linear((Mlp,), (Embed,), 1.0, jax.random.key(1))
    x = normal(2, Axis("replica", 3), Batch, Position, Embed)

    def form(kernels):
        def block(x, _):
            normed = kernels.rms_norm(x, hax.ones(Embed), 1e-5)
            wide = kernels.project(layer, normed)
            heads = normed.array.reshape(*normed.array.shape[:-1], 2, 4)
            attended = kernels.attend(heads, heads, heads, None, None)
            out = kernels.project(down, kernels.swiglu(wide, wide))
            return out + hax.named(attended.reshape(x.array.shape), x.axes), None

        def run(x):
            return jax.lax.scan(jax.checkpoint(block), x, None, length=2)[0]

        return hax.vmap(run, "replica")

    assert_rule(form, (x,), jnp.float32)
