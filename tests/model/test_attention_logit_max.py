"""The largest attention logits: NumPy's, over all pairs of tokens that attend, on one device and on a mesh."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from gregale.model import layers
from gregale.model.layers import largest_logits
from gregale.model.llama import Llama
from tests.mesh.support import SMALL, executed, held, kernels_of, layout_of, placed, small_model, token_batch
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
    np.testing.assert_allclose(found[0], by_oracle(model, batch), rtol=1e-5)


def by_oracle(model: Llama, batch) -> list[float]:
    """[layers]: with the model that is written again, a sequence at a time."""
    weights, plain, config = oracle.plain_weights(model), oracle.plain_batch(batch), model.config
    found = [-np.inf] * config.layers
    for row, tokens in enumerate(plain["tokens"]):
        positions, segments = plain["positions"][row], plain["segment_ids"][row]
        x = weights["embedding"][tokens]
        for layer in range(config.layers):
            turned = partial(oracle.rotate, positions=positions, config=config, layer=layer)
            taken = oracle.rms_norm(x, weights["attention_norm"][layer], config)
            q, k = (
                np.stack([turned(taken @ each) for each in weights[name][layer].swapaxes(0, 1)])
                for name in ("query", "key")
            )
            pairs = by_pairs(q.swapaxes(0, 1)[None], k.swapaxes(0, 1)[None], np.asarray(segments)[None], None)
            found[layer] = max(found[layer], pairs.max())
            x = x + oracle.attention(taken, weights, layer, positions, segments, config)
            taken = oracle.rms_norm(x, weights["mlp_norm"][layer], config)
            gate, up = taken @ weights["gate"][layer], taken @ weights["up"][layer]
            x = x + (gate * jax.nn.sigmoid(gate) * up) @ weights["down"][layer]
    return found
