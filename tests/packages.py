"""Packages that take seconds to import, and that most tests of a session do not need."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Package:
    """A package that is imported at its first use; without it the module that names it is skipped."""

    def __init__(self, name: str):
        if find_spec(name) is None:
            pytest.skip(f"needs {name}", allow_module_level=True)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # as pytest asks everything in a module
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
