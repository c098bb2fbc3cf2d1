"""Stacks of several kinds: cut into layer_segments, scanned as a plain loop over the layers computes."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.axes.layout import LAYERS
from gregale.model.config import REMAT
from gregale.model.execution import LayerScan, LayerSegment, layer_segments, named

WINDOWS, FULL = 0, 1
GEMMA_3 = (*[WINDOWS] * 5, FULL) * 2 + (WINDOWS,) * 2
QWEN_2 = (WINDOWS,) * 3 + (FULL,) * 2


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((0,) * 32, [((0,), 32)]),
        ((0, 1) * 13, [((0, 1), 13)]),
        (GEMMA_3, [((0,), 2), ((0, 0, 0, 1, 0, 0), 2)]),
        (QWEN_2, [((0,), 3), ((1,), 2)]),
        ((0,), [((0,), 1)]),
    ],
)
def test_a_stack_is_cut_so_that_few_layers_are_compiled(kinds, expected):
    assert layer_segments(kinds) == tuple(LayerSegment(*each) for each in expected)


@pytest.mark.parametrize(
    ("kinds", "remat", "unroll"),
    [*((GEMMA_3, remat, 1) for remat in REMAT), (GEMMA_3, "full", 4), (GEMMA_3, "none", 99), (QWEN_2, "full", 1)],
)
def test_scanned_layers_equal_a_loop(kinds, remat, unroll):
    """Carry, outs and gradients, by every policy; no kind is decided on by the program."""
    Layers, Embed = Axis(LAYERS, len(kinds)), Axis("embed", 3)
    weights = hax.random.normal(jax.random.key(0), (Layers, Embed))
    x = hax.random.normal(jax.random.key(1), (Embed,))
    run = LayerScan(remat=remat, unroll=unroll, recomputes_late=True)

    def block(x, weight, kind, place):
        x = hax.tanh(named(x * weight, "attention") + kind)
        return x, (x, place * 2)

    def scanned(weights, x):
        x, (outs, places) = run.scan_layers(block, kinds, x, weights, jnp.arange(len(kinds)))
        return hax.sum(hax.square(outs)).scalar() + hax.sum(x).scalar(), (outs.array, places)

    def looped(weights, x):
        found = []
        for place, kind in enumerate(kinds):
            x, _ = block(x, weights[LAYERS, place], kind, place)
            found.append(x.array)
        outs = jnp.stack(found)
        return jnp.sum(jnp.square(outs)) + hax.sum(x).scalar(), (outs, 2 * jnp.arange(len(kinds)))

    found, expected = (
        jax.jit(jax.value_and_grad(each, argnums=(0, 1), has_aux=True))(weights, x) for each in (scanned, looped)
    )
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), found, expected)
    assert "cond" not in str(jax.make_jaxpr(scanned)(weights, x))


def recomputed(jaxpr) -> list[bool]:
    """Whether each recomputation in a traced gradient waits for the gradient that it is for."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith(("remat", "checkpoint")) and equation.params["differentiated"]:
            found.append(equation.params["prevent_cse"] is True)
        for inner in jax.core.jaxprs_in_params(equation.params):
            found += recomputed(inner)
    return found


@pytest.mark.parametrize("remat", sorted(set(REMAT) - {"none"}))
@pytest.mark.parametrize(("kinds", "first", "layers"), [(GEMMA_3, 0, 7), ((0,) * 8, 0, 1), ((0,) * 8, 1, 2)])
def test_layers_are_differentiated_one_by_one(kinds, first, layers, remat):
    """No layer is computed again before its gradient is there, nor while the products of a later one wait."""
    weights = hax.ones((Axis(LAYERS, len(kinds)), Axis("embed", 3)))
    run = LayerScan(remat=remat, first_layers=first, recomputes_late=True)

    def loss(weights, x):
        x, _ = run.scan_layers(lambda x, weight, kind: (hax.tanh(x * weight + kind), None), kinds, x, weights)
        return hax.sum(x).scalar()

    traced = jax.make_jaxpr(jax.grad(loss))(weights, hax.ones(Axis("embed", 3)))
    assert sorted(recomputed(traced.jaxpr)) == [False] * first + [True] * (
        layers - first
    )  # not equal layers after those
    together = {GEMMA_3: 6 + 2}.get(kinds, 2 * (first > 0))  # each layer of the pattern, and the layer_segments
    assert str(traced).count("optimization_barrier") == together
