"""What `make` does before anything runs: it finds a Python, makes .venv or mends it, and says how far it is."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from tests.infra.stand_ins import ROOT, load_module, write_program

OLD = "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])"
WITHOUT_VENV = "import sys; sys.modules['ensurepip'] = None; sys.version_info = (3, 12, 4); exec(sys.argv[1])"


@pytest.fixture(scope="module")
def environment():
    return load_module(ROOT / "infra" / "environment.py")


def script(path: Path, text: str) -> None:
    write_program(path, f"#!/bin/sh\n{text}\n")


def find_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """find_python.sh where nothing but the files of a folder can be found."""
    command = [shutil.which("bash") or "", str(ROOT / "infra" / "find_python.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PATH": str(folder)})


def fake(folder: Path, name: str, program: str) -> None:
    script(folder / name, f'exec "{sys.executable}" -c "{program}" "$2"')


def test_the_first_python_that_is_fit_is_found_and_what_is_not_is_named(tmp_path):
    script(tmp_path / "python3.11", 'echo "pyenv: python3.11: command not found" >&2; echo more >&2; exit 127')
    fake(tmp_path, "python3.12", WITHOUT_VENV)
    fake(tmp_path, "python3", OLD)
    result = find_python(tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[1:4] == [
        "  python3.11: pyenv: python3.11: command not found",
        "  python3.12: 3.12.4, without venv and ensurepip (Debian and Ubuntu: apt install python3.12-venv)",
        "  python3: 3.9.2, older than 3.11",
    ]
    script(tmp_path / "python3", f'exec "{sys.executable}" "$@"')
    result = find_python(tmp_path)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, sys.executable, "")
    # One that is named is the only one tried.
    assert "  python3.12: 3.12.4, without venv" in find_python(tmp_path, "python3.12").stderr
    assert "nothing" in find_python(tmp_path, "no-such-python").stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_ends_when_there_is_no_python():
    # `make test` tells the makes inside of it what it is, and they say which folder they are in.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "setup", "PYTHON=/nowhere/python"]
    result = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True)
    assert result.returncode == 2
    assert "needs a Python from 3.11 on" in result.stderr
    assert result.stdout == ""


@pytest.fixture
def made(environment, tmp_path, monkeypatch):
    """A .venv in a folder of its own, whose Python is a script that notes what pip is given."""
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    venv = tmp_path / ".venv"
    pip = 'echo "Collecting rich"; echo "Installing collected packages: rich"; echo "$@" >> pip.txt'
    script(venv / "bin" / "python", f'if [ "$1" = -m ]; then {pip}; exit ${{PIP_CODE:-0}}; fi; exit 0')
    return venv


def test_what_is_complete_is_left_alone_until_the_pins_change(environment, made, capfd):
    assert environment.prepare(made, "dev", "2") == 0
    assert "2/2 installing 138 packages" in capfd.readouterr().out
    for name in ("dev", "core"):
        assert environment.prepare(made, name, "2") == 0
    assert capfd.readouterr().out == ""
    (made.parent / "constraints.txt").write_text("other")
    assert environment.prepare(made, "core", "2") == 0
    assert [line.split()[-1] for line in (made.parent / "pip.txt").read_text().splitlines()] == [".[dev,docs,tpu]", "."]


def test_pip_that_fails_is_not_taken_for_done(environment, made, monkeypatch, capfd):
    environment.prepare(made, "core", "3")
    assert environment.is_complete(made, "core")
    assert not environment.is_complete(made, "dev")
    monkeypatch.setenv("PIP_CODE", "1")
    assert environment.prepare(made, "dev", "2") == 1
    assert "pip stopped" in capfd.readouterr().err
    assert not environment.is_complete(made, "dev")
    assert "something stopped it" in environment.fault_of(made)


def test_a_broken_one_is_made_anew(environment, made, monkeypatch, capfd):
    python = made / "bin" / "python"
    faults = (
        lambda: (python.unlink(), python.symlink_to("/nowhere/python3")),
        lambda: script(python, "exit 1"),  # no pip
        (made / ".installing").touch,
        lambda: (made / ".core").write_text("/another/folder\n0\n"),
    )
    maker = made.parent / "maker"  # in place of `python -m venv --clear`
    script(maker, f'rm -rf "$4"; mkdir -p "$4/bin"; cp "{made.parent}/python" "$4/bin/python"')
    script(made.parent / "python", python.read_text().removeprefix("#!/bin/sh\n"))
    monkeypatch.setattr(sys, "executable", str(maker))
    environment.prepare(made, "core", "2")
    for fault in faults:
        fault()
        capfd.readouterr()
        assert environment.prepare(made, "core", "3") == 0
        said = capfd.readouterr().out
        assert "it is made anew.\n1/3 creating .venv with Python 3." in said
        assert "\n2/3 installing" in said
        assert environment.fault_of(made) is None


def test_a_link_is_used_and_never_changed(environment, made, capfd):
    link = made.parent / "clone"
    link.symlink_to(made)
    assert environment.prepare(link, "core", "2") == 0
    assert not (made.parent / "pip.txt").exists()
    (made / "bin" / "python").unlink()
    assert environment.prepare(link, "core", "2") == 1
    assert made.exists()
    assert "Remove the link, or mend that." in capfd.readouterr().err


PIP = """Obtaining file:///somewhere
Collecting jax[tpu]>=0.10.2
Collecting typing-extensions>=4
  Using cached typing_extensions-4.16.0-py3-none-any.whl (500 kB)
Processing /srv/files/typing_inspect-0.9.0-py3-none-any.whl (from draccus)
Requirement already satisfied: numpy>=2 in ./.venv/lib/python3.11/site-packages (from jax) (2.4.6)
Collecting typing_extensions
  Downloading jaxlib-0.10.2-cp311-cp311-manylinux_2_27_x86_64.whl (81.5 MB)
Installing collected packages: jax, jaxlib
Successfully installed jax-0.10.2 jaxlib-0.10.2
"""


def test_progress_counts_packages_once(environment, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environment, "INTERVAL_SECONDS", 0)
    environment.follow(PIP.splitlines(), 59, tmp_path / "marker")
    lines = capsys.readouterr().out.splitlines()
    assert "    3 of 59 packages: Processing /srv/files/typing_inspect-0.9.0-py3-none-any.whl" in lines
    assert "    all 4 are here; putting 2 in place" in lines
    assert (tmp_path / "marker").exists()
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    cuda = {name for name in pins if name.startswith(("jax-cuda", "nvidia-"))}
    assert abs(len(pins) - len(cuda) - environment.SETS["dev"][1]) <= 2, "some depend on the version of Python"
    assert len(cuda) == 17
    wanted = next(each for each in requires("jax") if each.endswith('extra == "cuda13"') and "plugin" in each)
    assert f"<={pins['jax-cuda13-plugin']}," in wanted
