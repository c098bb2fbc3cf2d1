"""Which form of attention a device, a dtype and a model get."""

import jax.numpy as jnp
import pytest

from gregale.errors import UserError
from gregale.model.kernels.dispatch import KernelRequest, check_matmul, kernels_for
from gregale.model.kernels.tpu.splash import Splash
from tests.mesh.support import Device

CPU, V5E = Device(platform="cpu"), Device(platform="tpu", device_kind="TPU v5 lite")
A100 = Device(device_kind="NVIDIA A100", compute_capability="8.0")
H100 = Device(device_kind="NVIDIA H100", compute_capability="9.0")
MI300 = Device(device_kind="AMD Instinct MI300X", compute_capability="gfx942")


def chosen(
    device: Device, attention: str = "auto", rules: str = "auto", dtype=jnp.bfloat16, head_size: int = 128, cap=None
):
    return kernels_for(KernelRequest(device, rules, jnp.dtype(dtype), head_size, cap), attention)


@pytest.mark.parametrize(
    ("name", "rules", "found"),
    [
        ("blocked", "cpu", chosen(CPU)),
        ("xla", "plain", chosen(CPU, rules="plain")),
        ("xla", "cpu", chosen(CPU, "xla")),
        ("splash", "tpu", chosen(V5E)),
        ("splash", "plain", chosen(V5E, rules="plain")),
        ("splash", "tpu", chosen(V5E, dtype=jnp.float32, head_size=192)),
        ("xla", "tpu", chosen(V5E, "xla")),
        ("xla", "tpu", chosen(V5E, head_size=512)),
        ("cudnn", "plain", chosen(A100)),
        ("cudnn", "plain", chosen(H100, head_size=256)),
        ("xla", "plain", chosen(A100, head_size=256)),
        ("xla", "plain", chosen(A100, head_size=100)),
        ("xla", "plain", chosen(A100, dtype=jnp.float32)),
        ("xla", "plain", chosen(MI300)),
    ],
)
def test_the_fastest_form_that_fits(name, rules, found):
    assert (found.attention, found.rules) == (name, rules)
    assert found.opaque == (name in ("splash", "cudnn"))


def test_splash_knows_its_chip():
    assert chosen(V5E).attend == Splash("TPU v5 lite")


@pytest.mark.parametrize(
    ("device", "attention", "options", "words"),
    [
        (CPU, "splash", {}, "it runs on TPUs, and the devices are of the platform cpu. `auto` would take blocked"),
        (CPU, "cudnn", {"rules": "plain"}, "runs on NVIDIA GPUs, .* platform cpu. `auto` would take xla"),
        (V5E, "cudnn", {}, "platform tpu. `auto` would take splash"),
        (V5E, "splash", {"head_size": 512}, "heads of 256 at most, and the model's are 512. `auto` would take xla"),
        (MI300, "cudnn", {}, "it runs on NVIDIA GPUs, and the devices are AMD Instinct MI300X. `auto` would take xla"),
        (A100, "cudnn", {"dtype": jnp.float32}, "it has no float32; compute.dtype: bfloat16 would work"),
        (A100, "cudnn", {"head_size": 192}, "of 8 wide and 128 at most on a NVIDIA A100, and the model's are 192"),
        (H100, "cudnn", {"cap": 50.0}, r"it has no cap on scores, and the model has one \(model.score_softcap\)"),
        (H100, "cudnn", {"head_size": 100}, "of 8 wide and 256 at most on a NVIDIA H100, and the model's are 100"),
    ],
)
def test_a_form_that_does_not_fit_is_refused_by_name(device, attention, options, words):
    with pytest.raises(UserError, match=f"^compute.attention is .*{words}.*here.$"):
        chosen(device, attention, **options)


V4 = Device(platform="tpu", device_kind="TPU v4")


@pytest.mark.parametrize(
    ("device", "fits"),
    [
        (CPU, "dtype int8 fp8"),
        (V5E, "dtype int8"),
        (V4, "dtype"),
        (A100, "dtype"),
        (H100, "dtype fp8"),
        (Device(device_kind="NVIDIA L4", compute_capability="8.9"), "dtype fp8"),
        (MI300, "dtype"),
    ],
)
def test_products_that_a_device_lacks_are_refused(device, fits):
    for matmul in ("dtype", "int8", "fp8"):
        if matmul in fits.split():
            check_matmul(matmul, device)
            continue
        with pytest.raises(UserError) as error:
            check_matmul(matmul, device)
        assert str(error.value) == (
            f"compute.matmul is {matmul}, but {device.device_kind} has no fast {matmul} products; "
            f"here it can be: {', '.join(fits.split())}."
        )
