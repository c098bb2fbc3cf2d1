"""All scripts are what shellcheck wants."""

import os
import shutil
import subprocess
import sys

from tests.infra.stand_ins import ROOT

SOURCED = ("carry.sh", "common.sh")


def test_shellcheck_finds_nothing_and_scripts_can_be_run(tmp_path):
    scripts = sorted((ROOT / "infra").rglob("*.sh"))
    assert [each.name for each in scripts if not each.stat().st_mode & 0o111] == [*SOURCED]
    shellcheck = shutil.which("shellcheck", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    assert shellcheck, "`make setup-dev` installs it, in the extra `dev`"
    command = [shellcheck, "--external-sources", *map(str, scripts)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "")
    (tmp_path / "script.sh").write_text("#!/bin/bash\nrm $1\n")
    assert subprocess.run([shellcheck, tmp_path / "script.sh"], capture_output=True, timeout=60).returncode == 1
