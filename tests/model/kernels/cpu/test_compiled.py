"""What made the plain form slow on XLA:CPU, large transposed copies, is not in what it makes of the rules."""

import re
from math import prod

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis

from gregale.axes.layout import BATCH
from gregale.model.kernels.blocked import CPU_ROWS
from gregale.model.kernels.cpu import cpu_kernels
from gregale.model.kernels.operations import PLAIN
from gregale.model.layers import POSITION, linear, rotate
from gregale.model.llama import LlamaConfig, Mlp

Batch, Position, Embed, Wide = Axis(BATCH, 2), Axis(POSITION, 64), Axis("embed", 8), Axis("mlp", 40)


def largest_transposed(function, *arguments) -> int:
    """Elements of the largest array that the compiled gradient of a function transposes in memory."""

    def total(*arguments):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(function(*arguments)))

    every = tuple(range(len(arguments)))
    text = jax.jit(jax.grad(total, argnums=every)).lower(*arguments).compile().as_text()
    copied = re.findall(r"= \w+\[([\d,]+)\]\{[\d,]*\} copy\(%transpose", text or "")
    return max((prod(map(int, sizes.split(","))) for sizes in copied), default=0)


@pytest.mark.parametrize(("kernels", "wide"), [(cpu_kernels(), False), (PLAIN, True)], ids=["rules", "plain"])
def test_no_operand_of_a_gradient_by_weights_is_transposed(kernels, wide):
    keys = jax.random.split(jax.random.key(0), 3)
    gate, up = (linear(Embed, Wide, 1.0, key) for key in keys[:2])
    mlp = Mlp(gate, up, linear(Wide, Embed, 1.0, keys[2]), "silu")
    x = hax.random.normal(jax.random.key(1), (Batch, Position, Embed))

    def run(x, mlp):
        gate, up = (kernels.project(layer, x) for layer in (mlp.gate, mlp.up))
        return kernels.project(mlp.down, kernels.swiglu(gate, up))

    tokens = Batch.size * Position.size
    found = largest_transposed(run, x, mlp)
    assert found == tokens * Wide.size if wide else found <= Embed.size * Wide.size, "a matrix of weights at most"


@pytest.mark.parametrize(("kernels", "weights"), [(cpu_kernels(), False), (PLAIN, True)], ids=["rules", "plain"])
def test_no_matrix_of_attention_weights_is_transposed(kernels, weights):
    length, heads, size = 2 * CPU_ROWS, 2, 4
    q, k, v = (jax.random.normal(jax.random.key(seed), (1, length, heads, size)) for seed in range(3))
    found = largest_transposed(lambda q, k, v: kernels.attend(q, k, v, None, None), q, k, v)
    assert found == heads * length * length if weights else found <= heads * length * size


@pytest.mark.parametrize(("kernels", "once"), [(cpu_kernels(), True), (PLAIN, False)], ids=["rules", "plain"])
def test_cosines_are_computed_once_for_all_that_is_rotated(kernels, once):
    config = LlamaConfig(heads=2, head_size=8)
    positions = hax.arange(Position).broadcast_axis(Batch)
    q, k = (
        hax.random.normal(jax.random.key(seed), (Batch, Position, config.Heads, config.HeadSize)) for seed in (0, 1)
    )

    def loss(q, k):
        return hax.sum(hax.sin(rotate(q, positions, config, kernels)) * rotate(k, positions, config, kernels)).scalar()

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(q, k).compile().as_text()
    found = len(re.findall(r" cosine\(%", text or "")) - 1  # one is that of the derivative of `loss`
    assert found == 1 if once else found > 1
