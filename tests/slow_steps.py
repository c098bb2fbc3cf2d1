"""A plugin: the device takes `seconds` longer for a step, without load for the processors that islands share.

    plugins: [slow_steps]
    callbacks: [{type: slow_steps, seconds: 4}]

The file `steps-PROCESS` of the current folder has a byte for each step.

It sleeps in a foreign function of the step's program. JAX dispatches programs with a `pure_callback` synchronously:
then the loop would not run a step ahead of the device, as it does on an accelerator.
"""

import ctypes
import os
import time
from dataclasses import dataclass

import jax
import numpy as np

from gregale import Callback, CallbackConfig
from gregale.settings import setting

NAME, ORIGINAL = "slow_steps", 1
_seconds = [0.0]  # of this process


@ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_float), ctypes.c_void_p)
def _sleep(out, inputs) -> None:
    time.sleep(_seconds[0])
    out[0] = _seconds[0]
    with open(f"steps-{os.getpid()}", "ab") as file:
        file.write(b".")


def _register() -> None:
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    target = capsule(ctypes.cast(_sleep, ctypes.c_void_p), b"xla._CUSTOM_CALL_TARGET", None)
    jax.ffi.register_ffi_target(NAME, target, platform="cpu", api_version=0)


_register()


@CallbackConfig.register_subclass("slow_steps")
@dataclass(frozen=True)
class SlowStepsConfig(CallbackConfig):
    seconds: float = setting(0.0, "seconds for which the device sleeps in a step")

    def build(self):
        _seconds[0] = self.seconds
        return SlowSteps()


class SlowSteps(Callback):
    def metrics(self, model, batch, execution):
        shape = jax.ShapeDtypeStruct((), np.float32)
        return {"slept": jax.ffi.ffi_call(NAME, shape, custom_call_api_version=ORIGINAL)()}
