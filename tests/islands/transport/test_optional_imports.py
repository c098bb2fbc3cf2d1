"""One module imports `cryptography`, and only when it is used; the lighthouse does not need JAX."""

import ast
import subprocess
import sys

import pytest

from gregale.errors import UserError
from gregale.islands.transport.tls import read_credentials
from tests.test_layers import MODULES, SOURCE

TRANSPORT = SOURCE / "islands" / "transport"


def test_no_other_module_imports_it():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            packages = {name.split(".")[0] for name in names}
            assert "torch" not in packages
            assert "cryptography" not in packages or path == TRANSPORT / "certificates.py"


def test_the_lighthouse_runs_without_jax():
    program = (
        "import sys\n"
        "sys.modules['jax'] = None\n"
        "import gregale.islands.lighthouse, gregale.islands.transport.group, gregale.islands.transport.transfer\n"
        "from gregale.islands.transport.lighthouse import Lighthouse\n"
        "Lighthouse('127.0.0.1:0', b'a token of the fleet').close()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_without_the_extra_one_line_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "gregale.islands.transport.certificates", raising=False)
    monkeypatch.delattr("gregale.islands.transport.certificates", raising=False)
    token = tmp_path / "token"
    token.write_bytes(b"a token of a fleet without it")
    token.chmod(0o600)
    with pytest.raises(UserError, match=r"need the extra `islands`\. Run `.* '\.\[islands\]'`"):
        read_credentials(token, "islands.token_file", "oslo")
