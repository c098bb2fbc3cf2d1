"""Hints for missing extras name commands that work in a clone, and extras that exist."""

import re
import shlex
import sys
import tomllib

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


def test_the_command_names_python_as_seen_from_the_clone(monkeypatch):
    for python, named in ((str(ROOT / ".venv" / "bin" / "python"), ".venv/bin/python"), ("/opt/of us/python",) * 2):
        monkeypatch.setattr(sys, "executable", python)
        assert command_of(install_hint("islands")) == [
            named,
            *["-m", "pip", "install", "--constraint", "constraints.txt", "--editable"],
            ".[islands]",
        ]
