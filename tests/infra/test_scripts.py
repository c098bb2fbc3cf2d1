"""All scripts are what shellcheck wants."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.infra.stand_ins import ROOT

SCRIPTS = sorted(path for path in (ROOT / "infra").rglob("*.sh"))
SOURCED = ("carry.sh", "common.sh")


@pytest.fixture(scope="module")
def shellcheck() -> str:
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found, "`make setup-dev` installs it, in the extra `dev`"
    return found


def test_shellcheck_finds_nothing(shellcheck):
    result = subprocess.run(
        [shellcheck, "--external-sources", *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout) == (0, "")


def test_shellcheck_would_find_something(shellcheck, tmp_path):
    script = tmp_path / "script.sh"
    script.write_text("#!/bin/bash\nrm $1\n")
    assert subprocess.run([shellcheck, str(script)], capture_output=True, timeout=60).returncode == 1


@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.name not in SOURCED], ids=lambda path: path.name)
def test_scripts_can_be_run(script):
    assert script.stat().st_mode & 0o111
