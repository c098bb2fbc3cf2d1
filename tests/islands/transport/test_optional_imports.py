"""The engine alone imports PyTorch, and only when it is used; the lighthouse needs neither that nor JAX."""

import ast
import subprocess
import sys

import pytest

from gregale.errors import UserError
from gregale.islands.transport.group import load_torch
from tests.test_layers import MODULES, SOURCE

TRANSPORT = SOURCE / "islands" / "transport"


def test_no_other_module_imports_it():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            is_transport = any(name.split(".")[0] == "torch" for name in names)
            assert not is_transport or path == TRANSPORT / "group.py"


def test_the_lighthouse_runs_without_it():
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import gregale.programs.lighthouse, gregale.islands.transport.group, gregale.islands.transport.transfer\n"
        "from gregale.islands.transport.lighthouse import serve\n"
        "serve('127.0.0.1:0', b'a token of the fleet').close()\n"
        "assert 'jax' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_without_the_extra_one_line_says_what_to_do(monkeypatch):
    for name in ("torch", "torch.distributed"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"needs the extra `islands`\. Run `.* '\.\[islands\]'`"):
        load_torch()
