"""The choice of the form of the operations for a device; no other module chooses."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from gregale.errors import UserError
from gregale.model.kernels import gpu
from gregale.model.kernels.blocked import CPU_ROWS, ROWS, Gathered, attend, attend_with_largest
from gregale.model.kernels.cpu import cpu_kernels
from gregale.model.kernels.operations import PLAIN, Attend, AttendWithLargest, Kernels
from gregale.model.kernels.tpu.blocks import LARGEST_HEAD_SIZE
from gregale.model.kernels.tpu.kernels import tpu_kernels
from gregale.model.kernels.tpu.splash import Splash

INT8_TPUS = ("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e")  # twice the rate of bfloat16
FIRST_WITH_FP8 = (8, 9)  # compute capability of a GPU


@dataclass(frozen=True)
class KernelRequest:
    """The inputs of the choice of operations."""

    device: Any  # a device of the computation, of JAX or described by a topology
    rules: str  # `auto` (the platform's own, if it has any) or `plain`
    dtype: jnp.dtype  # of activations
    head_size: int  # width of a head of attention
    cap: float | None = None  # the limit of its scores; None: no limit
    context: int = 1  # devices that share a sequence

    @property
    def platform(self) -> str:
        return self.device.platform


@dataclass(frozen=True)
class AttentionKernel:
    """A form of attention.

    - `misfit(task)`: the reason why it is unusable, as the end of a sentence; None: it is usable
    - `attend(task)`: the function that computes it, and that which also returns the largest scores, if it has it
    - `opaque`: see `Kernels`
    """

    misfit: Callable[[KernelRequest], str | None]
    attend: Callable[[KernelRequest], tuple[Attend, AttendWithLargest | None]]
    opaque: bool


def _off_tpu(task: KernelRequest) -> str | None:
    if task.platform != "tpu":
        return f"it runs on TPUs, and the devices are of the platform {task.platform}"
    if task.head_size > LARGEST_HEAD_SIZE:
        return f"its blocks are for heads of {LARGEST_HEAD_SIZE} at most, and the model's are {task.head_size}"
    return None


def _off_cudnn(task: KernelRequest) -> str | None:
    if task.platform != "gpu":
        return f"it runs on NVIDIA GPUs, and the devices are of the platform {task.platform}"
    if (most := gpu.largest_head_size(task.device.compute_capability)) is None:
        return f"it runs on NVIDIA GPUs, and the devices are {task.device.device_kind}"
    if task.cap is not None:
        return "it has no cap on scores, and the model has one (model.score_softcap)"
    if task.dtype == jnp.float32:
        return "it has no float32; compute.dtype: bfloat16 would work"
    if task.head_size > most or task.head_size % gpu.HEAD_SIZE_MULTIPLE:
        return (
            f"its heads are a multiple of {gpu.HEAD_SIZE_MULTIPLE} wide and {most} at most on a "
            f"{task.device.device_kind}, and the model's are {task.head_size}"
        )
    return None


def _splash(task: KernelRequest) -> tuple[Attend, AttendWithLargest]:
    kernel = Splash(task.device.device_kind)
    return kernel, kernel.with_largest


def _off_rules(task: KernelRequest) -> str | None:
    if task.platform == "cpu" and task.rules == "auto":
        return None
    return "it is one of the CPU's rules of differentiation"


OWN_RULES: dict[str, Callable[[Any], Kernels]] = {  # of platforms, for a device
    "cpu": lambda device: cpu_kernels(),
    "tpu": lambda device: tpu_kernels(device.num_cores),
}

# Fastest first. `blocked` cannot be chosen by name: it is one of the rules (`compute.autodiff_rules`).
FORMS = {
    "splash": AttentionKernel(_off_tpu, _splash, opaque=True),
    "cudnn": AttentionKernel(_off_cudnn, lambda task: (gpu.attend, None), opaque=True),
    "blocked": AttentionKernel(_off_rules, lambda task: (attend, attend_with_largest), opaque=False),
    "xla": AttentionKernel(lambda task: None, lambda task: (PLAIN.attend, None), opaque=False),
}


def kernels_for(task: KernelRequest, attention: str) -> Kernels:
    """Return the operations for a request.

    - `attention`: the name of a form, or `auto`: the fastest that fits

    Raises `UserError` if the named form does not fit.
    """
    if task.context > 1:
        return _shared(task, attention)
    name = _fastest(task) if attention == "auto" else attention
    form = FORMS[name]
    if (misfit := form.misfit(task)) is not None:
        raise UserError(f"compute.attention is {name}, but {misfit}. `auto` would take {_fastest(task)} here.")
    chosen, with_largest = form.attend(task)
    return replace(_rules(task), attention=name, opaque=form.opaque, attend=chosen, attend_with_largest=with_largest)


def check_matmul(matmul: str, device: Any) -> None:
    """Raise `UserError` if the devices have no fast products of the 8-bit numbers that `compute.matmul` names."""
    kind, fits = device.device_kind, {"dtype": True, "int8": True, "fp8": True}
    if device.platform == "tpu":
        fits = {"dtype": True, "int8": kind in INT8_TPUS, "fp8": False}
    elif device.platform == "gpu":
        fits = {"dtype": True, "int8": False, "fp8": _capability(device) >= FIRST_WITH_FP8}
    if not fits[matmul]:
        would = ", ".join(name for name, fit in fits.items() if fit)
        raise UserError(
            f"compute.matmul is {matmul}, but {kind} has no fast {matmul} products; here it can be: {would}."
        )


def _capability(device: Any) -> tuple[int, ...]:
    """Return the compute capability of an NVIDIA GPU, such as (8, 9); empty for other GPUs."""
    found = device.compute_capability
    return tuple(map(int, found.split("."))) if re.fullmatch(r"\d+\.\d+", found) else ()


def _shared(task: KernelRequest, attention: str) -> Kernels:
    """Return the operations for sequences that several devices share."""
    rules, misfit = _rules(task), _off_tpu(task)
    if attention in ("auto", "splash") and misfit is None:
        kernel = Splash(task.device.device_kind, devices=task.context)
        return replace(rules, attention="splash", opaque=True, attend=kernel, attend_with_largest=kernel.with_largest)
    if attention not in ("auto", "xla"):
        reason = misfit if attention == "splash" else "it has no form for sequences that several devices share"
        raise UserError(
            f"mesh.context is {task.context} and compute.attention is {attention}, but {reason}. `auto` would work: it "
            "takes a kernel where there is one."
        )
    own, rows = rules, ROWS
    if rules.rules == "cpu":
        # Batch and positions are both split, so the partitioner could not join them to one axis.
        own, rows = replace(rules, project=PLAIN.project), CPU_ROWS
    form = Gathered(task.context, rows)
    return replace(own, attention="gathered", opaque=True, attend=form, attend_with_largest=form.with_largest)


def _rules(task: KernelRequest) -> Kernels:
    return OWN_RULES[task.platform](task.device) if task.rules == "auto" and task.platform in OWN_RULES else PLAIN


def _fastest(task: KernelRequest) -> str:
    return next(name for name, form in FORMS.items() if form.misfit(task) is None)
