"""The scripts of `infra/` are what shellcheck wants, and take the commands that pages show."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.docs.pages import PAGES, ROOT, commands, name

SHOWN = [
    pytest.param(line, id=f"{name(page)}: {line[:60]}")
    for page in PAGES
    for line in commands(page.read_text())
    if line.startswith("infra/")
]


@pytest.mark.parametrize("line", SHOWN)
def test_a_dry_run_takes_it(line):
    script, command, *words = shlex.split(line, comments=True)
    if script == "infra/slurm.sh" and command == "log":
        return  # there is no log
    result = subprocess.run(
        [f"./{script}", command, "--dry-run", *[word for word in words if word != "--dry-run"]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_every_script_is_shown():
    assert {shlex.split(param.values[0])[0] for param in SHOWN} == {
        "infra/boxes.sh",
        "infra/tpu_vm.sh",
        "infra/slurm.sh",
        "infra/k8s/train.sh",
    }


def test_shellcheck_finds_nothing_and_scripts_can_be_run(tmp_path):
    scripts = sorted((ROOT / "infra").rglob("*.sh"))
    assert [each.name for each in scripts if not each.stat().st_mode & 0o111] == ["carry.sh", "common.sh"], (
        "which are sourced"
    )
    shellcheck = shutil.which("shellcheck", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    assert shellcheck, "`make setup-dev` installs it, in the extra `dev`"
    command = [shellcheck, "--external-sources", *map(str, scripts)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "")
    (tmp_path / "script.sh").write_text("#!/bin/bash\nrm $1\n")
    assert subprocess.run([shellcheck, tmp_path / "script.sh"], capture_output=True, timeout=60).returncode == 1
