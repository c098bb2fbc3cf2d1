"""What cuDNN is asked for: the same attention, with its two operations written out, and a step lowered for CUDA."""

import json
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from gregale.model import execution
from gregale.model.kernels import gpu as cudnn
from gregale.model.kernels.dispatch import kernels_for
from gregale.model.kernels.operations import PLAIN
from tests.cost.steps import lowered_for, small_setup
from tests.mesh.support import Device
from tests.model.kernels.forms import assert_equal
from tests.model.kernels.gpu.cudnn_oracle import stand_in

CUDNN = replace(PLAIN, attention="cudnn", opaque=True, attend=cudnn.attend)
FORWARD, BACKWARD = "__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"


def operands(length: int, packed: bool, more: tuple[int, ...] = ()):
    shapes = ((*more, 2, length, heads, 8) for heads in (4, 2, 2))
    q, k, v = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(shapes))
    return q, k, v, jnp.broadcast_to(jnp.arange(length) // 4, (*more, 2, length)) if packed else None


@pytest.mark.parametrize(("length", "window", "packed"), [(7, None, True), (8, 3, True), (9, 3, False)])
def test_it_is_asked_for_the_plain_forms_attention(monkeypatch, length, window, packed):
    stand_in(monkeypatch)
    *qkv, segments = operands(length, packed)
    assert_equal(
        lambda kernels: lambda q, k, v: kernels.attend(q, k, v, segments, window), CUDNN, tuple(qkv), jnp.float32
    )


def test_sinks_are_in_the_sum_that_it_keeps(monkeypatch):
    stand_in(monkeypatch)
    *qkv, segments = operands(7, True)
    sinks = 2 * jax.random.normal(jax.random.key(5), (2, 7, 4, 1))

    def form(kernels):
        return lambda q, k, v, sinks: kernels.attend(q, k, v, segments, 3, None, sinks)

    assert_equal(form, CUDNN, (*qkv, sinks), jnp.float32)


def test_replicas_that_are_mapped_around_it_are_more_rows(monkeypatch):
    """With segments of their own, and with the same for all."""
    stand_in(monkeypatch)
    *qkv, segments = operands(6, True, (3,))
    for ids, axis in ((segments, 0), (segments[0], None)):

        def form(kernels, ids=ids, axis=axis):
            def attend(q, k, v, ids):
                return kernels.attend(q, k, v, ids, 3)

            return lambda q, k, v: jax.vmap(attend, in_axes=(0, 0, 0, axis))(q, k, v, ids)

        assert_equal(form, CUDNN, tuple(qkv), jnp.float32)


def test_no_mask_is_kept_for_the_backward_pass(monkeypatch):
    """Only what goes in, the output and the log-sum-exp."""
    stand_in(monkeypatch)
    q, k, v, segments = operands(64, True)
    _, backward = jax.vjp(lambda q, k, v: cudnn.attend(q, k, v, segments, None), q, k, v)
    kept = [leaf.shape for leaf in jax.tree.leaves(backward)]
    assert kept
    assert not [shape for shape in kept if shape[-2:] == (64, 64)]


@pytest.fixture
def on_a_gpu(monkeypatch):
    gpu = Device(device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
    chosen = lambda task, attention: kernels_for(replace(task, device=gpu), attention)  # noqa: E731
    monkeypatch.setattr(execution, "kernels_for", chosen)


def custom_calls(program: str) -> Counter:
    return Counter(re.findall(r"custom_call @([\w$.]+)", program))


@pytest.mark.parametrize(("remat", "window", "passes"), [("full", 9, 2), ("context", None, 1)])
def test_a_step_for_cuda_has_cudnns_kernels_and_nothing_of_the_cpus(on_a_gpu, remat, window, passes):
    """Under replicas, with heads and rows that are split; `context` spares the second forward pass."""
    setup = small_setup(
        (2, 2, 2), compute={"dtype": "bfloat16", "remat": remat}, model={"hidden": 64, "sliding_window": window}
    )
    program = lowered_for(setup, "cuda")
    assert custom_calls(program) == {FORWARD: passes, BACKWARD: 1}
    # Of 2 x 4 rows, heads and their keys of a device: 4 rows [16, 4, 8], with half of 8 heads and of 4.
    operand, key, bias = "tensor<4x16x4x8xbf16>", "tensor<4x16x2x8xbf16>", "tensor<4x1x16x16xbf16>"
    inner, statistics = "tensor<4x4x16x8xbf16>", "tensor<4x4x16xf32>"
    assert signature(program, FORWARD) == ([operand, key, key, bias], [inner, statistics])
    by_key = "tensor<4x2x16x8xbf16>"
    assert signature(program, BACKWARD) == (
        [operand, key, key, statistics, operand, bias, operand],
        [inner, by_key, by_key],
    ), "no gradient of the bias"
    assert "16x16xf32" not in program, "no scores outside of the kernels"
    found = asked_of(program, FORWARD)
    assert (found["mask_type"], found["fmha_scale"], found["sliding_window_length"]) == ("CAUSAL", 8**-0.5, 0)


def signature(program: str, name: str) -> tuple[list[str], list[str]]:
    """Types of a custom call's operands and results, but for the workspace."""
    line = next(line for line in program.splitlines() if f"@{name}(" in line)
    inputs, outputs = re.findall(r" : \(([^()]*)\) -> \(([^()]*)\)", line)[-1]
    return inputs.split(", "), outputs.split(", ")[:-1]


def asked_of(program: str, name: str) -> dict:
    """The options that cuDNN gets."""
    line = next(line for line in program.splitlines() if f"@{name}(" in line)
    written = re.findall(r'backend_config = "(.*?)"', line)[0]
    return json.loads(written.replace(r"\22", '"'))["cudnn_fmha_backend_config"]


def test_without_segments_the_kernel_itself_hides_what_is_before_the_window():
    q, k, v, _ = operands(9, False)
    program = jax.jit(lambda q, k, v: cudnn.attend(q, k, v, None, 3))
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    text = program.trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert custom_calls(text) == {"__cudnn$fmhaSoftmax": 1}
    assert asked_of(text, "__cudnn$fmhaSoftmax")["sliding_window_length"] == 3
    assert signature(text, "__cudnn$fmhaSoftmax")[1] == ["tensor<2x4x9x8xbf16>"], "nothing for a backward pass"
