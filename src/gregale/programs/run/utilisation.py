"""How much of what the chips can do goes into the model: model FLOPs utilisation (MFU)."""

from __future__ import annotations

from gregale.audit.chips import of_device
from gregale.audit.roofline import model_flops_per_token
from gregale.model.config import LlamaConfig
from gregale.programs.plan.shapes import step_shape
from gregale.programs.run.setup import Setup


def peak_tokens_per_second(setup: Setup) -> float | None:
    """Tokens a second if all devices did nothing but the model's products, at their peak in bfloat16.

    So `tokens_per_second / peak_tokens_per_second` is the utilisation. None on CPU devices and unknown chips, and for
    models without a closed form.
    """
    mesh = setup.layout.mesh
    chip = of_device(mesh.devices.flat[0].device_kind)
    if chip is None or not isinstance(setup.config.model, LlamaConfig):
        return None
    return mesh.size * chip.flops_per_second / chip.devices / model_flops_per_token(step_shape(setup))
