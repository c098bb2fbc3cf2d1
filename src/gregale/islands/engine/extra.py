"""Loads what the extra `islands` brings, and says so in one line where it is not there."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from gregale.errors import UserError, install_hint

MISSING = "gregale island needs the extra `islands`. " + install_hint("islands")


def load_torch() -> ModuleType:
    """PyTorch with its process groups. Call it only when JAX has its devices: each has its own idea of threads."""
    try:
        import torch.distributed

    except ImportError:
        raise UserError(MISSING) from None
    return torch


def load_coordination() -> ModuleType:
    """torchft's Rust module alone: importing the package around it would load PyTorch, which takes a second."""
    name = "torchft._torchft"
    if name in sys.modules:
        return sys.modules[name]
    package = importlib.util.find_spec("torchft")
    folders = list(package.submodule_search_locations or ()) if package else []
    found = [path for folder in folders for path in Path(folder).glob("_torchft.*.so")]
    if not found:
        raise UserError(MISSING)
    # Its threads write a line for each request to stderr, unless told otherwise before it is loaded.
    os.environ.setdefault("RUST_LOG", "error")
    spec = importlib.util.spec_from_file_location(name, found[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module
