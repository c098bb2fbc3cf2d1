"""The engine alone imports PyTorch and torchft, and only when it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec

import pytest

from gregale.errors import UserError
from gregale.islands.engine import extra
from tests.test_layers import MODULES, SOURCE

ENGINE = SOURCE / "islands" / "engine"


def test_no_other_module_imports_it():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            is_engine = any(name.split(".")[0] in ("torch", "torchft") for name in names)
            assert not is_engine or path == ENGINE / "extra.py"


def test_it_is_loaded_when_it_is_used():
    program = (
        "import sys, gregale.islands.engine.group, gregale.islands.engine.transfer\n"
        "from gregale.islands.engine.coordinator import serve\n"
        "assert not any(name.startswith('torch') for name in sys.modules)\n"
        "serve('127.0.0.1:0', 1, 1.0, 1.0).close()\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'jax' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_without_the_extra_one_line_says_what_to_do(monkeypatch):
    with monkeypatch.context() as patch:
        for name in ("torch", "torch.distributed"):
            patch.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=r"needs the extra `islands`\. Run `.* '\.\[islands\]'`"):
            extra.load_torch()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torchft._torchft", raising=False)
        patch.setattr("importlib.util.find_spec", lambda name: None if name == "torchft" else find_spec(name))
        with pytest.raises(UserError, match=r"needs the extra `islands`"):
            extra.load_coordination()
