"""Rotary frequencies against the published cases, and rotation against complex numbers."""

from dataclasses import replace

import haliax as hax
import numpy as np
import pytest
from haliax import Axis

from gregale.huggingface.config import read_config
from gregale.model.config import LinearScaling, Llama3Scaling
from gregale.model.kernels.cpu import cpu_kernels
from gregale.model.kernels.operations import PLAIN
from gregale.model.kernels.tpu.kernels import tpu_kernels
from gregale.model.layers import frequencies, rotate
from gregale.model.llama import LlamaConfig
from tests.model import oracle

LLAMA_3 = Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192)


@pytest.mark.parametrize(
    "scaling", [None, LLAMA_3, Llama3Scaling(factor=32.0, original_context=64), LinearScaling(factor=4.0)]
)
@pytest.mark.parametrize(("half", "base"), [(64, 500000.0), (8, 10000.0)])
def test_frequencies_equal_the_published_cases(half, base, scaling):
    expected = [oracle.rotary_frequency(pair, half, base, scaling) for pair in range(half)]
    np.testing.assert_allclose(frequencies(half, base, scaling), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("base", "rope"),
    [
        (1e6, {"factor": 4.0, "original_max_position_embeddings": 32768}),
        (1e4, {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7}),
        (1e4, {"factor": 2.0, "original_max_position_embeddings": 512, "beta_fast": 8, "beta_slow": 0.5}),
        (1e4, {"factor": 2.0, "original_max_position_embeddings": 512, "truncate": False, "attention_factor": 1.5}),
    ],
)
def test_yarn_is_that_of_transformers(base, rope):
    transformers, rope = pytest.importorskip("transformers"), {**rope, "rope_type": "yarn", "rope_theta": base}
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 8}
    theirs = transformers.LlamaConfig(**sizes, vocab_size=8, rope_parameters=rope, max_position_embeddings=4096)
    expected, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs)
    ours = read_config(theirs.to_dict(), "config.json")[1]
    np.testing.assert_allclose(frequencies(32, base, ours.rotary_scaling), expected.numpy(), rtol=1e-5)
    assert ours.kinds[0].score_factor == pytest.approx(factor**2)


@pytest.mark.parametrize("kernels", [PLAIN, cpu_kernels(), tpu_kernels()], ids=["plain", "cpu", "tpu"])
def test_rotation_is_a_complex_product(kernels):
    Position, Heads, HeadSize = Axis("position", 5), Axis("heads", 3), Axis("head_size", 8)
    x = np.random.default_rng(0).standard_normal((5, 3, 8), dtype=np.float32)
    places = np.array([0, 3, 4, 100, 101])
    config = LlamaConfig(rotary_scaling=Llama3Scaling(original_context=16))
    turned = rotate(
        hax.named(x, (Position, Heads, HeadSize)), hax.named(places, Position), replace(config, head_size=8), kernels
    )
    for head in range(3):
        np.testing.assert_allclose(turned.array[:, head], oracle.rotate(x[:, head], places, config), atol=1e-5)
    np.testing.assert_array_equal(turned.array[0], x[0])
