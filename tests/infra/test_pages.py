"""The commands of `infra/` that pages show are ones that the scripts take."""

import os
import shlex
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
        "infra/tpu_vm.sh",
        "infra/slurm.sh",
        "infra/k8s/train.sh",
    }
