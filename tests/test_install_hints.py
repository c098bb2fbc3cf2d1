"""Hints for missing extras name commands that work in a clone, and extras that exist."""

import re
import shlex
import subprocess
import sys
import tomllib

from gregale import errors
from gregale.errors import install_hint
from tests.docs.pages import PAGES, ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FROM_AN_INDEX = re.compile(r"install\W+(?:-\S+\s+)*['\"]?gregale\b")


def command_of(hint: str) -> list[str]:
    found = re.fullmatch(r"Run `(.+)` in your clone of Gregale\.", hint)
    assert found, hint
    return shlex.split(found[1])


def from_an_index(text: str) -> bool:
    return bool(FROM_AN_INDEX.search(text) or re.search(r"['\"]gregale\[", text))


def test_nothing_installs_gregale_from_an_index():
    scripts = [path for path in (ROOT / "infra").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert [path for path in [*PAGES, *SOURCES, *scripts] if from_an_index(path.read_text())] == []
    assert from_an_index("pip install 'gregale[islands]'")
    assert from_an_index("pip install --upgrade gregale")


def test_every_extra_that_is_named_exists():
    text = "".join(path.read_text() for path in [*PAGES, *SOURCES])
    named = set(re.findall(r"install_hint\([\"'](\w+)[\"']\)", text))
    named |= {extra for words in re.findall(r"--editable '\.\[([\w,]+)\]'", text) for extra in words.split(",")}
    assert {"islands", "hf", "formats", "tpu", "cuda"} <= named <= set(EXTRAS)


def test_pip_takes_the_command(tmp_path, monkeypatch):
    """In a clone with a package of its own, so that the extra costs no download."""
    for folder in ("src/gregale", "part"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src" / "gregale" / "errors.py").write_bytes((ROOT / "src" / "gregale" / "errors.py").read_bytes())
    (tmp_path / "constraints.txt").write_text((ROOT / "constraints.txt").read_text())
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "gregale"\nversion = "0"\noptional-dependencies.part = ["pip"]\n'
    )
    for python, named in ((str(ROOT / ".venv" / "bin" / "python"), ".venv/bin/python"), ("/opt/of us/python",) * 2):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", python)
            assert command_of(install_hint("islands"))[0] == named, "as seen from the clone"
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "src" / "gregale" / "errors.py"))
    words = [*command_of(install_hint("part")), "--dry-run", "--no-index", "--no-build-isolation"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "Would install gregale" in result.stdout
