"""Complete-P against the paper's table, whose forward pass has factors; changes of logits at two widths."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.axes.parameters import names_of_arrays, trainable
from gregale.model.config import ExpertsConfig
from gregale.model.llama import GemmaConfig, Llama, LlamaConfig
from gregale.model.losses import losses_of
from gregale.model.parametrisation import CompletePConfig, scaled
from gregale.optim import AdamWConfig, ConstantSchedule, GroupConfig, LionConfig, MuonConfig
from tests.mesh.support import one_device, token_batch

VOCABULARY = Axis("vocab", 16)
M, L = 4, 3  # hidden and layers over those of the base
SIZES = {"layers": 6, "hidden": 32, "heads": 4, "mlp": 48, "parametrisation": CompletePConfig(8, 2)}
LLAMA = LlamaConfig(**SIZES, attention_bias=True)
GEMMA = GemmaConfig(**SIZES, tied_head=True, norms="around", norm_offset=1.0, scaled_embedding=True)


class Row(NamedTuple):
    """A row of the paper's table with alpha 1: factors for a weight that the forward pass multiplies by `forward`."""

    forward: float = 1
    deviation: float = 1  # of initial weights
    rate: float = 1
    decay: float = 1
    epsilon: float = 1 / (M * L)


MATRIX = Row(1, M**-0.5, 1 / M, M)
OUT = Row(1 / L, M**-0.5 * L**0.5, 1 / M, M)  # the deviation of `standard` has 1 / sqrt(layers), that of the base
OF_LLAMA = {
    "embedding": Row(epsilon=1 / M),
    "attention_norm.weight": Row(),
    "query.weight": MATRIX,
    "query.bias": Row(),
    "key.weight": MATRIX,
    "key.bias": Row(),
    "value.weight": MATRIX,
    "value.bias": Row(),
    "out.weight": OUT,
    "mlp_norm.weight": Row(),
    "gate.weight": MATRIX,
    "up.weight": MATRIX,
    "down.weight": OUT,
    "norm.weight": Row(epsilon=1 / M),
    "head": Row(1 / M, epsilon=1 / M),
}
# Tied: the factor of the logits is that of the last norm. The embedding's takes sqrt(hidden) back to the base's. A
# norm at the end of half a layer has its factor.
OF_GEMMA = OF_LLAMA | {
    "embedding": Row(M**-0.5, epsilon=1 / M),
    "norm.weight": Row(M**-0.5, epsilon=1 / M),
    "out_norm.weight": Row(1 / L),
    "out.weight": OUT._replace(forward=1),
    "down.weight": OUT._replace(forward=1),
}
CASES = pytest.mark.parametrize(("config", "table"), [(LLAMA, OF_LLAMA), (GEMMA, OF_GEMMA)], ids=["llama", "gemma"])


def row_of(name: str, table: dict[str, Row]) -> Row:
    return table[max((end for end in table if name.endswith(end)), key=len)]


def arrays(tree) -> dict[str, np.ndarray]:
    """The arrays of a model by the name of their first layer."""
    return {names[0]: np.asarray(leaf.array) for leaf, names in names_of_arrays(tree)}


def drawn(config: LlamaConfig, seed: int):
    """A model with other numbers in place of all weights."""
    random = np.random.default_rng(seed)
    abstract = jax.eval_shape(lambda: Llama.init(config, VOCABULARY, jax.random.key(0)))
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), jnp.float32), abstract)


@CASES
def test_initial_weights_are_those_of_the_table_times_the_forward_factor(config, table):
    both = config, replace(config, parametrisation=None)
    found, standard = (arrays(jax.jit(lambda key, c=c: c.init(VOCABULARY, key))(jax.random.key(0))) for c in both)
    for name, array in found.items():
        row, shift = row_of(name, table), config.norm_offset if name.endswith("norm.weight") else 0.0
        wanted = (standard[name] + shift) * (row.forward * row.deviation) - shift
        np.testing.assert_allclose(array, wanted, rtol=1e-6, atol=1e-7, err_msg=name)
    assert replace(config, hidden=8, heads=1, layers=2).scalings == (), "the base model has no factor"


def adam(weight, gradients, rate: float, decay: float, epsilon: float) -> np.ndarray:
    """AdamW as the paper of Adam has it, in float64."""
    m = v = 0.0
    for step, gradient in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        direction = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + epsilon)
        weight = weight - rate * (direction + decay * weight)
    return weight


@CASES
def test_updates_are_those_of_the_table_times_the_forward_factor(config, table):
    rate, decay, epsilon = 0.1, 0.3, 0.5  # an epsilon that counts
    group = GroupConfig("head|*.query.weight", learning_rate=0.5, weight_decay=0.2)
    adamw = AdamWConfig(
        rate, ConstantSchedule(), decay, "all", None, betas=(0.9, 0.95), epsilon=epsilon, groups=(group,)
    )
    weights, gradients = drawn(config, 0), [drawn(config, seed) for seed in (1, 2)]
    optimizer = adamw.build(weights, 2, scalings=config.scalings).whole()

    @jax.jit
    def step(found, state, gradient):
        updates, state = optimizer.update(gradient, state, found)
        return jax.tree.map(jnp.add, found, updates), state

    found, state = weights, jax.jit(optimizer.init)(weights)
    for gradient in gradients:
        found, state = step(found, state, gradient)
    start, slopes = arrays(weights), [arrays(each) for each in gradients]
    for name, array in arrays(found).items():
        row, (factor, own) = row_of(name, table), (0.5, 0.2) if group.has(name) else (1, decay)
        slope = [each[name].astype(np.float64) * row.forward for each in slopes]  # of the weight without its factor
        begin = start[name].astype(np.float64) / row.forward
        wanted = adam(begin, slope, rate * factor * row.rate, own * row.decay, epsilon * row.epsilon)
        np.testing.assert_allclose(array, row.forward * wanted, rtol=2e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("rms", [0.2, None])
def test_orthogonal_updates_have_the_norm_of_the_base(rms):
    """The norm by which outputs change is that of the base: with `rms` an update's own grows with the width."""
    experts = ExpertsConfig(count=4, width=48, shared=16, shared_gate=True)
    config = replace(LLAMA, experts=experts)
    weights, gradient = trainable(drawn(config, 0)), trainable(drawn(config, 1))
    muon = MuonConfig(1.0, ConstantSchedule(), 0.0, clip_norm=None, rms=rms, epsilon=1e-20)
    built = [muon.build(weights, 1, scalings=each).whole() for each in (config.scalings, ())]

    def update(optimizer):
        return jax.jit(lambda gradient, weights: optimizer.update(gradient, optimizer.init(weights), weights)[0])

    ours, plain = (arrays(update(each)(gradient, weights)) for each in built)
    grows = 1 if rms is None else M**0.5
    hidden, out, few = (factor / grows for factor in (1, 1 / L, M**-0.5))
    factors = {"query.weight": hidden, "mlp.up": hidden, "attention.out.weight": out, "mlp.down": out}
    factors |= {"shared.down.weight": out, "mlp.router": few, "mlp.shared_gate": few}
    factors |= {"head": 1 / M, "embedding": 1, "query.bias": 1}  # AdamW's
    for end, factor in factors.items():
        name = next(each for each in ours if each.endswith(end))
        np.testing.assert_allclose(ours[name], factor * plain[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_step_changes_logits_alike_at_all_widths():
    """A step of Adam at the same rate changes logits 8 times as much at 8 times the width, and not with complete-P."""
    batch, rate = token_batch(4, 8, VOCABULARY.size, uneven=False), 0.01
    changes = {}
    for width in (32, 256):
        config = LlamaConfig(layers=1, hidden=width, heads=width // 16, mlp=width, init_scale=0.1)
        scalings = replace(config, parametrisation=CompletePConfig(32)).scalings

        def loss(model):
            return losses_of(model.loss(batch, one_device())).trained

        plain = jax.jit(lambda key, c=config: Llama.init(c, VOCABULARY, key))(jax.random.key(0))
        for kind, own in {"standard": (), "complete_p": scalings}.items():

            @jax.jit
            def moved(plain, own=own):
                model = scaled(plain, own, 0.0)
                lion = LionConfig(rate, ConstantSchedule(), 0.0, clip_norm=None)
                optimizer = lion.build(model, 1, scalings=own).whole()
                updates, _ = optimizer.update(jax.grad(loss)(model), optimizer.init(model), model)
                after = jax.tree.map(jnp.add, model, updates)
                return [each.logits(batch, one_device()).array for each in (model, after)]

            before, after = jax.device_get(moved(plain))
            changes[kind, width] = float(np.sqrt(np.mean(np.square(after - before))))
    assert 0.5 < changes["complete_p", 256] / changes["complete_p", 32] < 2, changes
    assert changes["standard", 256] / changes["standard", 32] > 4, changes
