"""The model against a plain rewrite: loss and every gradient, for all options; decoding; what remat keeps."""

from dataclasses import replace
from functools import cache

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.axes.layout import BATCH
from gregale.axes.parameters import parameter_count
from gregale.errors import UserError
from gregale.model.cache import for_tokens
from gregale.model.config import ComputeConfig, LinearScaling, Llama3Scaling
from gregale.model.kernels.cpu import cpu_kernels
from gregale.model.kernels.operations import PLAIN
from gregale.model.kernels.tpu.kernels import tpu_kernels
from gregale.model.llama import GemmaConfig, Llama, LlamaConfig
from tests.mesh.support import assert_trees_close, executed, kernels_of, layout_of, one_device, small_model, token_batch
from tests.model import oracle

# A context of 8 tokens makes all three cases of the scaling appear among a head's few frequencies.
STRETCHED = Llama3Scaling(factor=8.0, original_context=8)
BASE = LlamaConfig(layers=2, hidden=16, heads=4, mlp=24, init_scale=0.3)
CONFIGS = {
    "llama2": BASE,
    "llama3": replace(BASE, kv_heads=2, rotary_base=500000.0, rotary_scaling=STRETCHED, norm_epsilon=1e-3),
    "mistral": replace(BASE, kv_heads=1, head_size=6, sliding_window=3),
    "qwen2": replace(BASE, kv_heads=2, attention_bias=True, tied_head=True),
    "qwen3": replace(BASE, kv_heads=2, head_size=8, qk_norm=True, tied_head=True, sliding_window=20),
    "olmo2": replace(
        BASE, kv_heads=2, norms="after", qk_norm=True, qk_norm_over="heads", rotary_scaling=LinearScaling(factor=4.0)
    ),
    "gemma": GemmaConfig(
        layers=2, hidden=16, heads=4, mlp=24, init_scale=0.3, kv_heads=2, tied_head=True, activation="gelu",
        norms="around", norm_offset=1.0, qk_norm=True, scaled_embedding=True, sliding_window=3, full_layers=(1,),
        window_rotary_base=50.0, rotary_scaling=STRETCHED, score_width=7.0, score_softcap=2.0, logit_softcap=3.0,
    ),
}  # fmt: skip
ROWS, POSITIONS, VOCABULARY = 2, 12, 32
BATCH_OF_TOKENS = token_batch(ROWS, POSITIONS, VOCABULARY)


def perturbed(model: Llama) -> Llama:
    """Biases and norms away from 0 and 1, where a mistake in them would not show."""
    leaves, structure = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


def made(name: str) -> Llama:
    return perturbed(small_model(CONFIGS[name], VOCABULARY))


def mean_loss(run):
    def mean(model, batch):
        total, weight = model.loss(batch, run)
        return total / weight

    return jax.jit(jax.value_and_grad(mean))


@cache
def oracle_loss_and_gradients(name: str, packed: bool):
    model, batch = made(name), batch_of(packed)

    def mean(weights):
        total, weight = oracle.loss(weights, oracle.plain_batch(batch), model.config)
        return total / weight

    return jax.jit(jax.value_and_grad(mean))(oracle.plain_weights(model))


def batch_of(packed: bool):
    return BATCH_OF_TOKENS if packed else without(BATCH_OF_TOKENS, "segment_ids")


def without(batch, name: str):
    return {key: value for key, value in batch.items() if key != name}


CPU, TPU = cpu_kernels(), tpu_kernels()
CASES = [*((name, name != "mistral", CPU) for name in CONFIGS if name not in ("llama2", "qwen3"))]
CASES += [pytest.param("gemma", True, PLAIN, marks=pytest.mark.quick), ("llama3", False, TPU)]


@pytest.mark.parametrize(("name", "packed", "kernels"), CASES)
def test_loss_and_gradients_equal_a_plain_rewrite(name, packed, kernels):
    loss, gradients = mean_loss(one_device(loss_block=5, kernels=kernels))(made(name), batch_of(packed))
    expected, expected_gradients = oracle_loss_and_gradients(name, packed)
    assert loss == pytest.approx(float(expected), abs=1e-5)
    assert_trees_close(oracle.plain_weights(gradients), expected_gradients, atol=1e-5, rtol=1e-5)


def test_every_option_changes_the_loss():
    """So the rewrite would notice an option that does nothing."""
    model = made("qwen3")
    full = oracle.plain_weights(model)
    batch = oracle.plain_batch(BATCH_OF_TOKENS)
    config = replace(model.config, sliding_window=3, rotary_scaling=STRETCHED)
    changes = {
        "sliding_window": replace(config, sliding_window=None),
        "rotary_scaling": replace(config, rotary_scaling=None),
        "rotary_scaling.type": replace(config, rotary_scaling=LinearScaling()),
        "norms": replace(config, norms="after"),
        "qk_norm": replace(config, qk_norm=False),
        "norm_epsilon": replace(config, norm_epsilon=1e-1),
        "rotary_base": replace(config, rotary_base=100.0),
    }
    before = oracle.loss(full, batch, config)[0]
    for name, changed in changes.items():
        assert abs(oracle.loss(full, batch, changed)[0] - before) > 1e-2, name
    assert abs(oracle.loss(full, without(batch, "segment_ids"), config)[0] - before) > 1e-2
    model = made("gemma")
    full, config = oracle.plain_weights(model), model.config
    before = oracle.loss(full, batch, config)[0]
    names = "activation norms norm_offset full_layers window_rotary_base score_width score_softcap logit_softcap"
    for name in (*names.split(), "scaled_embedding"):
        assert abs(oracle.loss(full, batch, replace(config, **{name: getattr(BASE, name)}))[0] - before) > 1e-2, name


def saved_bytes(remat: str) -> int:
    """Bytes that the compiled loss and gradient keep beside their arguments and results."""
    model = small_model(replace(BASE, layers=8, hidden=32), VOCABULARY)
    batch = token_batch(8, 64, VOCABULARY)
    run = one_device(remat=remat)
    compiled = jax.jit(jax.grad(lambda model: model.loss(batch, run)[0])).lower(model).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_remat_policies_save_as_much_as_their_names_say():
    saved = {remat: saved_bytes(remat) for remat in ("none", "projections", "context", "full")}
    assert saved["full"] < saved["context"] < saved["projections"] < saved["none"]


def value_and_gradients_in(dtype, config: LlamaConfig):
    """(weights, batch) -> mean loss and gradients of the rewrite, computed in a dtype; compiled once."""

    def mean(weights, batch):
        total, weight = oracle.loss({name: array.astype(dtype) for name, array in weights.items()}, batch, config)
        return total / weight

    return jax.jit(jax.value_and_grad(mean))


def test_bfloat16_is_as_close_to_float32_as_a_plain_model_in_bfloat16():
    """By the error of each gradient, a mean over batches: in a single batch one may be twice as near as the other."""
    model = made("qwen2")
    weights, ours = oracle.plain_weights(model), mean_loss(one_device(dtype=jnp.dtype(jnp.bfloat16)))
    exact, plain = (value_and_gradients_in(dtype, model.config) for dtype in (jnp.float32, jnp.bfloat16))
    errors = {name: np.zeros(2) for name in weights}
    for seed in range(8):
        batch = token_batch(ROWS, POSITIONS, VOCABULARY, seed=seed)
        expected, expected_gradients = exact(weights, oracle.plain_batch(batch))
        loss, gradients = ours(model, batch)
        assert loss == pytest.approx(float(expected), rel=0.005)
        assert float(loss) != float(expected)
        both = oracle.plain_weights(gradients), plain(weights, oracle.plain_batch(batch))[1]
        for name, gradient in expected_gradients.items():
            assert both[0][name].dtype == jnp.float32
            errors[name] += [np.linalg.norm(each[name] - gradient) / np.linalg.norm(gradient) for each in both]
    for name, (error, plain_error) in errors.items():
        assert error < 1.2 * plain_error, name


@pytest.mark.parametrize(
    ("name", "apart", "context"),
    [
        ("llama3", False, 1),
        ("llama3", True, 4),
        ("mistral", False, 1),
        ("mistral", True, 2),
        ("qwen2", False, 1),
        ("gemma", False, 2),
        ("gemma", True, 1),
    ],
)
def test_decode_equals_the_full_forward(name, apart, context):
    """Prompts of two lengths, filled up on the left, then single tokens: the last place of the full forward."""
    layout = layout_of(context=context)
    model, run = made(name), executed(layout.inside_replica(), unroll=2, kernels=kernels_of(layout))
    weights, Rows = oracle.plain_weights(model), Axis(BATCH, ROWS)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, POSITIONS))
    zeros = np.zeros(POSITIONS, int)
    full = jax.jit(jax.vmap(lambda row: oracle.logits(weights, row, np.arange(POSITIONS), zeros, model.config)))(tokens)
    model = model.unstacked() if apart else model
    width, lengths = 8, np.array([5, 7])
    first = hax.named(width - lengths, (Rows,))
    slots = width if model.config.window_of_all == 3 else POSITIONS + 2  # fewer than tokens: slots are written again
    prefill = jax.jit(lambda tokens: model.prefill(tokens, first, slots, run))
    decode = jax.jit(lambda tokens, caches, place: model.decode(tokens, caches, place, first, for_tokens(run)))
    prompts = [np.concatenate([np.full(width - n, 9), row[:n]]) for row, n in zip(tokens, lengths, strict=True)]
    logits, caches = prefill(hax.named(np.stack(prompts), (Rows, Axis("position", width))))
    for more in range(POSITIONS - lengths.max() + 1):
        if more:
            one = tokens[np.arange(ROWS), lengths + more - 1][:, None]
            logits, caches = decode(hax.named(one, (Rows, Axis("position", 1))), caches, width + more - 1)
        found = logits.rearrange((BATCH, "vocab"))
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found.array, full[np.arange(ROWS), lengths + more - 1], atol=1e-5, rtol=1e-5)


def test_parameter_count_is_the_closed_form():
    c = CONFIGS["qwen3"]
    attention = c.hidden * c.HeadSize.size * (2 * c.heads + 2 * c.KvHeads.size) + 2 * c.HeadSize.size
    expected = VOCABULARY * c.hidden + c.hidden + c.layers * (attention + 3 * c.hidden * c.mlp + 2 * c.hidden)
    assert parameter_count(small_model(c, VOCABULARY)) == expected


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LlamaConfig(hidden=100, heads=12), ["model.hidden is 100", "100 / 12 = 8.333", "model.head_size"]),
        (lambda: LlamaConfig(heads=12, kv_heads=5), ["model.kv_heads is 5", "12 / 5"]),
        (lambda: LlamaConfig(hidden=36, heads=12), ["model.head_size is 3", "even"]),
        (lambda: ComputeConfig(attention="flash"), ["attention is 'flash'", "auto, splash, cudnn, xla"]),
    ],
)
def test_a_bad_configuration_says_what_would_work(make, words):
    with pytest.raises(UserError) as error:
        make()
    for word in words:
        assert word in str(error.value)
