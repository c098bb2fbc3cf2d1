"""The largest attention logits: NumPy's, over all pairs of tokens that attend, on one device and on a mesh; QK-clip."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray

from gregale.axes.layout import REPLICA, Layout, is_named
from gregale.cost import audit
from gregale.errors import UserError
from gregale.methods.psdp import Psdp
from gregale.model import layers
from gregale.model.config import ExpertsConfig
from gregale.model.kernels.cpu import cpu_kernels
from gregale.model.kernels.operations import PLAIN, Kernels
from gregale.model.layers import largest_logits
from gregale.model.llama import Llama
from gregale.model.losses import LARGEST_LOGITS
from gregale.optim import ConstantSchedule, MuonConfig
from gregale.optim.config import GroupConfig
from gregale.programs.runtime.setup import checked_loss
from tests.cost.steps import small_setup
from tests.mesh.support import (
    SMALL,
    assert_trees_close,
    executed,
    first_state,
    held,
    kernels_of,
    layout_of,
    placed,
    small_model,
    token_batch,
)
from tests.model import oracle


def by_pairs(q, k, segments, window) -> np.ndarray:
    """[batch, kv_heads], a pair at a time."""
    rows, length, heads, width = q.shape
    shared = heads // k.shape[2]
    found = np.full((rows, k.shape[2]), -np.inf)
    for row, head, i, j in np.ndindex(rows, heads, length, length):
        near = window is None or i - j < window
        if j <= i and near and (segments is None or segments[row, i] == segments[row, j]):
            logit = float(q[row, i, head] @ k[row, j, head // shared]) / width**0.5
            found[row, head // shared] = max(found[row, head // shared], logit)
    return found


@pytest.mark.parametrize(("window", "packed"), [(None, False), (3, True)])
def test_they_are_the_largest_of_the_pairs(window, packed, monkeypatch):
    monkeypatch.setattr(layers, "QUERIES", 4)  # three blocks, of which the last begins early
    random = np.random.default_rng(0)
    q, k = (random.normal(size=(2, 10, heads, 4)).astype(np.float32) for heads in (4, 2))
    segments = np.sort(random.integers(0, 3, (2, 10)), axis=1) if packed else None
    found = largest_logits(q, k, segments, window, np.arange(10))
    np.testing.assert_allclose(found, by_pairs(q, k, segments, window), rtol=1e-5)


def test_a_mesh_finds_those_of_one_device():
    config = replace(SMALL, kv_heads=4)
    model, batch = small_model(config), token_batch(rows=4)
    found = []
    for layout in (layout_of(), layout_of(2, 2, 2), layout_of(data=2, context=2)):
        execution = executed(layout, kernels=kernels_of(layout))
        maxima = jax.jit(lambda model, batch, execution=execution: model.attention_logit_maxima(batch, execution))
        here = placed(model, layout, layout.params), held(batch, layout)
        found.append(np.asarray(maxima(*here).array))
    assert found[0].shape == (config.layers,)
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-5)
    np.testing.assert_allclose(found[0], by_oracle(model, batch).max(1), rtol=1e-5)


STEPS = 10
MUON = MuonConfig(learning_rate=0.02, heads=True, schedule=ConstantSchedule())
GROUPED = replace(SMALL, kv_heads=4, attention_bias=True)


def steps_of(layout: Layout, limit: float | None, microbatches: int, kernels: Kernels) -> tuple[Psdp, Callable]:
    """PSDP with Muon on the small model, and its compiled step."""
    model = small_model(GROUPED)
    execution = executed(layout.inside_replica(), kernels=kernels, measures_logits=limit is not None)
    clip = None if limit is None else lambda parameters, maxima: parameters.with_logits_below(limit, maxima)
    method = Psdp(
        model,
        lambda model, batch: model.loss(batch, execution),
        MUON.build(model, STEPS, layout),
        layout,
        microbatches=microbatches,
        after_update=clip,
    )
    return method, jax.jit(method.step, out_shardings=(method.shardings(jax.eval_shape(method.init)), None))


@pytest.mark.parametrize(
    ("sizes", "kernels"), [({"replica": 2, "data": 2}, PLAIN), ({"replica": 2, "model": 2}, cpu_kernels())]
)
def test_heads_with_large_logits_shrink_after_a_step(sizes, kernels):
    """Ten steps equal those without QK-clip, each followed by a scaling in NumPy by the oracle's largest logits."""
    batches = [token_batch(rows=8, seed=seed) for seed in range(STEPS)]
    limit = 0.9 * float(np.median(by_oracle(small_model(GROUPED), batches[0])))
    plain, plain_step = steps_of(layout_of(), None, 1, cpu_kernels())
    layout = layout_of(**sizes)
    method, step = steps_of(layout, limit, 2, kernels)
    wanted, state = plain.init(), jax.jit(method.init, out_shardings=method.shardings(jax.eval_shape(method.init)))()
    clipped = []
    for batch in batches:
        largest = by_oracle(wanted.parameters, batch)
        wanted, metrics = plain_step(wanted, batch)
        wanted = wanted._replace(parameters=scaled(wanted.parameters, np.sqrt(limit / np.maximum(largest, limit))))
        state, found = step(state, held(batch, layout))
        np.testing.assert_allclose(found.loss, metrics.loss, rtol=2e-5)
        clipped.append(int((largest > limit).sum()))
    assert sum(clipped) > STEPS
    assert max(clipped) < GROUPED.layers * 4
    assert_trees_close(state.parameters, wanted.parameters, atol=2e-5)
    sent = audit(step.lower(state, held(batches[0], layout)).compile(), layout.mesh)
    assert [each.bytes for each in sent.over(REPLICA) if each.kind == "all-reduce" and each.bytes == 4 * largest.size]
    assert not [each for each in sent.over(REPLICA) if each.loop]


def scaled(model: Llama, by: np.ndarray) -> Llama:
    """The model with the queries and keys of each layer and group of heads times [layers, kv_heads]."""
    attention = model.blocks.attention

    def times(layer, by):
        names = ("layers", layer.weight.axis_names[-2])
        return jax.tree.map(lambda leaf: (leaf * NamedArray(by, names)).rearrange(leaf.axes), layer, is_leaf=is_named)

    by = by.astype(np.float32)
    queries = times(attention.query, np.repeat(by, GROUPED.heads // GROUPED.kv_heads, axis=1))
    attention = replace(attention, query=queries, key=times(attention.key, by))
    return replace(model, blocks=replace(model.blocks, attention=attention))


def test_each_stack_has_the_logits_of_its_own_layers():
    config = replace(SMALL, layers=3, dense_layers=1, experts=ExpertsConfig(count=4, active=2, width=16))
    model, batch, layout = small_model(config), token_batch(rows=4), layout_of()
    execution = executed(layout, measures_logits=True)
    limit = 1.0

    def after(model, batch):
        maxima = model.loss(batch, execution).maxima
        return (
            maxima[LARGEST_LOGITS],
            model.attention_logit_maxima(batch, execution),
            model.with_logits_below(limit, maxima),
        )

    largest, of_layers, clipped = jax.jit(after)(model, batch)
    np.testing.assert_allclose(largest.array.max(1), of_layers.array, rtol=1e-6)
    for stack, rows in enumerate([[0], [1, 2]]):
        before, now = (each.blocks.parts[stack].attention for each in (model, clipped))
        by = np.sqrt(limit / np.maximum(largest.array[np.array(rows)], limit))[:, None, :, None]
        np.testing.assert_allclose(now.query.weight.array, before.query.weight.array * by, rtol=1e-6)
        np.testing.assert_allclose(now.key.weight.array, before.key.weight.array * by, rtol=1e-6)
        np.testing.assert_array_equal(now.value.weight.array, before.value.weight.array)


def clipped_setup(**optimizer):
    others = {"optimizer": MuonConfig(learning_rate=1e-9, weight_decay=0.0, qk_clip=1e-6, **optimizer)}
    return small_setup((1, 1, 1), others=others)


def test_a_configured_step_shrinks_queries_and_keys_and_nothing_else():
    setup = clipped_setup()
    state = first_state(setup)
    moved, _ = jax.jit(setup.method.step)(state.method, token_batch(rows=setup.config.batch.size, vocabulary=257))
    before, after = state.method.parameters.blocks, moved.parameters.blocks
    for name in ("query", "key"):
        old, new = (getattr(blocks.attention, name).weight.array for blocks in (before, after))
        assert np.abs(new).max() < 0.1 * np.abs(old).max()
    for old, new in ((before.attention.value, after.attention.value), (before.mlp, after.mlp)):
        assert_trees_close(new, old, atol=1e-6)


def test_frozen_queries_and_losses_without_maxima_are_refused():
    with pytest.raises(UserError, match=r"rate of layer\.0\.attention\.key\.weight is 0"):
        clipped_setup(groups=(GroupConfig("*.key.*", learning_rate=0.0),))
    setup = clipped_setup()
    execution = executed(layout_of(), measures_logits=True)
    model = SimpleNamespace(loss=lambda batch, execution: (jnp.float32(1), jnp.float32(1)))
    with pytest.raises(UserError, match="returns no maxima of the name 'largest_logits'"):
        checked_loss(setup.config.model, model, {}, execution)


def by_oracle(model: Llama, batch) -> np.ndarray:
    """[layers, kv_heads]: with the model that is written again, a sequence at a time."""
    weights, plain, config = oracle.plain_weights(model), oracle.plain_batch(batch), model.config
    weights, plain = jax.device_get((weights, plain))
    found = np.full((config.layers, config.kv_heads or config.heads), -np.inf)
    for row, tokens in enumerate(plain["tokens"]):
        positions, segments = plain["positions"][row], plain["segment_ids"][row]
        x = weights["embedding"][tokens]
        for layer in range(config.layers):
            turned = partial(oracle.rotate, positions=positions, config=config, layer=layer)
            taken = oracle.rms_norm(x, weights["attention_norm"][layer], config)
            q, k = (
                np.stack([turned(each) for each in projected(taken, weights, name, layer)]) for name in ("query", "key")
            )
            pairs = by_pairs(q.swapaxes(0, 1)[None], k.swapaxes(0, 1)[None], np.asarray(segments)[None], None)
            found[layer] = np.maximum(found[layer], pairs[0])
            x = x + oracle.attention(taken, weights, layer, positions, segments, config)
            taken = oracle.rms_norm(x, weights["mlp_norm"][layer], config)
            gate, up = taken @ weights["gate"][layer], taken @ weights["up"][layer]
            x = x + (gate * jax.nn.sigmoid(gate) * up) @ weights["down"][layer]
    return found


def projected(x, weights, name: str, layer: int) -> np.ndarray:
    """[heads, position, head_size]"""
    found = np.einsum("pe,ehd->hpd", x, weights[name][layer])
    bias = weights.get(f"{name}_bias")
    return found if bias is None else found + bias[layer][:, None]
