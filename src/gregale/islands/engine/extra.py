"""Loads what the extra `islands` brings, and says so in one line where it is not there."""

from __future__ import annotations

import os
from types import ModuleType

from gregale.errors import UserError, install_hint

MISSING = "gregale island needs the extra `islands`. " + install_hint("islands")


def load_torch() -> ModuleType:
    """PyTorch with its process groups. Call it only when JAX has its devices: each has its own idea of threads."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else Gloo's own errors reach the user's terminal
    try:
        import torch.distributed

    except ImportError:
        raise UserError(MISSING) from None
    return torch
