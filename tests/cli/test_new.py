"""`gregale new` writes copies of the examples in config/, also where Gregale was installed from a wheel."""

import subprocess
import sys
import tomllib
import zipfile

import pytest

from gregale.cli import main
from gregale.errors import install_hint
from tests.docs.pages import ROOT

EXAMPLES = sorted((ROOT / "config").glob("*.yaml"))


def test_a_starter_is_a_copy_of_an_example_and_replaces_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "first.yaml"]) == 0
    assert (tmp_path / "first.yaml").read_text() == (ROOT / "config" / "quickstart.yaml").read_text()
    for example in EXAMPLES:
        assert main(["new", f"{example.stem}.yaml", "--from", example.stem]) == 0
        assert (tmp_path / example.name).read_bytes() == example.read_bytes()
    capsys.readouterr()
    for arguments, words in (
        (["first.yaml", "--from", "islands"], "first.yaml cannot be made: File exists."),
        (["other.yaml", "--from", "quikstart"], "Did you mean `quickstart`?"),
        (["no/other.yaml"], "no/other.yaml cannot be made: No such file"),
    ):
        assert main(["new", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"first.yaml", *(path.name for path in EXAMPLES)}


def test_outside_of_a_clone_the_packages_of_an_extra_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("gregale.errors.__file__", str(tmp_path / "lib" / "gregale" / "errors.py"))
    monkeypatch.setattr(sys, "executable", "/opt/python")
    hint = install_hint("formats")
    assert hint.startswith("Run `/opt/python -m pip install ")
    assert [word.strip("'").partition(">=")[0] for word in hint.strip("`.").split()[5:]] == ["pyarrow", "zstandard"]


def test_every_data_file_is_named_for_the_wheel():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package, patterns in named.items():
        folder = ROOT / "src" / package.replace(".", "/")
        assert all(any(folder.glob(pattern)) for pattern in patterns), package
    for path in (ROOT / "src" / "gregale").rglob("*.*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            package = ".".join(path.parent.relative_to(ROOT / "src").parts)
            assert any(path.match(pattern) for pattern in named.get(package, ())), path


@pytest.mark.soak
def test_a_wheel_has_every_module_and_every_data_file(tmp_path):
    """Data files are the examples too, which are a link in the source."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    content = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("gregale/")}
    source = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "gregale").rglob("*")}
    files = {name for name in source if (ROOT / "src" / name).is_file() and "__pycache__" not in name}
    starters = {f"gregale/starters/{path.name}" for path in (*EXAMPLES, *(ROOT / "config").glob("*.jsonl"))}
    assert content == files | starters
    assert {"gregale/py.typed", "gregale/web/page.js", "gregale/cost/kernel_cycles.json"} <= content
