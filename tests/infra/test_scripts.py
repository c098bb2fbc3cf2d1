"""The scripts of `infra/` are what shellcheck wants, and take the commands that pages show."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.docs.pages import PAGES, ROOT, commands, name
from tests.infra.stand_ins import load_module

load_module(ROOT / "infra" / "launch.py")
# Launchers in Python, which need no process of their own here.
LAUNCHERS = {f"infra/{name}.sh": load_module(ROOT / "infra" / f"{name}.py") for name in ("tpu_vm", "boxes")}
LAUNCHERS["infra/k8s/train.sh"] = load_module(ROOT / "infra" / "kube.py")

SHOWN = [
    pytest.param(line, id=f"{name(page)}: {line[:60]}")
    for page in PAGES
    for line in commands(page.read_text())
    if line.startswith("infra/")
]


@pytest.mark.parametrize("line", SHOWN)
def test_a_dry_run_takes_it(line, capfd):
    script, command, *words = shlex.split(line, comments=True)
    if script == "infra/slurm.sh" and command == "log":
        return  # there is no log
    words = [command, "--dry-run", *[word for word in words if word != "--dry-run"]]
    code = LAUNCHERS[script].main(words) if script in LAUNCHERS else run(script, *words)
    printed = capfd.readouterr()
    assert code == 0, printed.err
    assert printed.out


def run(script: str, *words: str) -> int:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run([f"./{script}", *words], cwd=ROOT, timeout=60, env=environment).returncode


@pytest.mark.parametrize("script", LAUNCHERS)
def test_a_launcher_finds_a_python(script, capfd):
    assert run(script, "--help") == 0
    assert capfd.readouterr().out.startswith(f"usage: {script} ")


def test_shellcheck_finds_nothing_and_scripts_can_be_run_and_are_shown(tmp_path):
    names = ("boxes.sh", "tpu_vm.sh", "slurm.sh", "k8s/train.sh")
    assert {shlex.split(param.values[0])[0] for param in SHOWN} == {f"infra/{name}" for name in names}
    scripts = sorted((ROOT / "infra").rglob("*.sh"))
    assert [each.name for each in scripts if not each.stat().st_mode & 0o111] == ["carry.sh"], "which is sourced"
    shellcheck = shutil.which("shellcheck", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    assert shellcheck, "`make setup-dev` installs it, in the extra `dev`"
    command = [shellcheck, "--external-sources", *map(str, scripts)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "")
    (tmp_path / "script.sh").write_text("#!/bin/bash\nrm $1\n")
    assert subprocess.run([shellcheck, tmp_path / "script.sh"], capture_output=True, timeout=60).returncode == 1
