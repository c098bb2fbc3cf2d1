"""What cuDNN is asked for, computed by XLA in its place: masks, windows and odd lengths. Its kernels need a GPU."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from gregale.model.kernels.gpu import cudnn
from gregale.model.kernels.plain import PLAIN
from tests.model.kernels.forms import assert_equal


@pytest.fixture
def by_xla(monkeypatch):
    attention = jax.nn.dot_product_attention

    def instead(*arguments, implementation: str, **options):
        assert implementation == "xla" or arguments[0].shape[1] % 2 == 0
        return attention(*arguments, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    return replace(PLAIN, attention="cudnn", opaque=True, attend=cudnn.attend)


@pytest.mark.parametrize(("length", "window", "packed"), [(7, None, True), (8, 3, True), (9, 3, False)])
def test_it_is_asked_for_the_plain_forms_attention(by_xla, length, window, packed):
    q, k, v = (jax.random.normal(jax.random.key(seed), (2, length, heads, 8)) for seed, heads in enumerate((4, 2, 2)))
    segments = jnp.broadcast_to(jnp.arange(length) // 4, (2, length)) if packed else None

    def form(kernels):
        return lambda q, k, v: kernels.attend(q, k, v, segments, window)

    assert_equal(form, by_xla, (q, k, v), jnp.float32)
