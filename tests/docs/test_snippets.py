"""What the pages show works: Python runs, commands and YAML are what `gregale` reads, links lead somewhere.

A page of WALKS is carried out as a reader would do it: Python, configurations and commands, one after the other.
"""

import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from gregale.cli import PROGRAMS, main, split_name
from gregale.cli.invocation import bound
from gregale.errors import UserError
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.docs.pages import API, PAGES, ROOT, WALKS, blocks, commands, fences, headings, name, pages_with
from tests.forked import run
from tests.plugins import EXAMPLES, plugins_from

LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)[^)]*\)")
LINK_TO_SECTION = re.compile(r"\]\(([^)#\s:]*)#([^)\s]+)\)")


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page not in (*WALKS, API)], ids=name)
def test_python_runs_as_a_reader_would_run_it(page, tmp_path):
    script = tmp_path / "snippets.py"
    script.write_text("\n".join(blocks(page.read_text(), "python")))
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    result = run([sys.executable, script.name], cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", WALKS, ids=name)
def test_a_page_is_carried_out(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    said = {}  # by the last block of each language
    for language, body in fences(page.read_text()):
        if language == "yaml":
            (tmp_path / body.partition("\n")[0].removeprefix("# ")).write_text(body)
        elif language == "python":
            exec(compile(body, name(page), "exec"), {})
        else:
            assert language == "bash"
            for line in commands(f"```bash\n{body}```"):
                program, *arguments = shlex.split(line)
                assert program == "gregale"
                assert main(arguments) == 0, line
        said[language] = capsys.readouterr().out
    assert "temperature 0" in page.read_text()
    assert said["python"] == said["bash"] != "", "transformers and Gregale say the same"


def check_command(line: str) -> None:
    """Parses a command line with its real configuration file, and runs nothing."""
    name, rest = split_name(shlex.split(line, comments=True)[1:])
    if name in ("--help", "--version") or "--help" in rest:
        assert name in (*PROGRAMS, "--help", "--version")
        return
    command = PROGRAMS[name].command
    assert bound(name, replace(command, main=lambda *_: 0), rest)() == 0


SHOWN = [
    pytest.param(line, id=f"{name(page)}: {line[:60]}")
    for page in PAGES
    if page not in WALKS
    for line in commands(page.read_text())
    if line.startswith(("gregale ", ".venv/bin/gregale "))
]


@pytest.mark.parametrize("line", SHOWN)
def test_commands_are_read(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_command(line)


def test_a_wrong_command_is_found(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="optimiser"):
        check_command("gregale train config/quickstart.yaml --optimiser.type sgd  # a comment")


YAML = [(page, block) for page in PAGES for block in blocks(page.read_text(), "yaml")]


@pytest.mark.parametrize(("page", "block"), YAML, ids=[name(page) for page, _ in YAML])
def test_yaml_is_a_configuration_or_a_part_of_one(page, block, tmp_path):
    file = tmp_path / "part.yaml"
    file.write_text(block)
    given = [f"--{key}=1" for key in ("name", "steps") if not re.search(f"^{key}:", block, re.MULTILINE)]
    with plugins_from(EXAMPLES):
        load(TrainConfig, file, given)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in LINK.findall(page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), (page, target)


def anchors(text: str) -> set[str]:
    """The anchors of a page that GitHub and the site both make of its headings; of equal headings that of the first."""
    on_github = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(text)}
    return on_github & {slugify(heading, "-") for heading in headings(text)}


def sections_without_heading(page: Path, text: str) -> list[str]:
    """The links of a page to a section of this clone that GitHub or the site does not find."""
    found = [((page.parent / target) if target else page, anchor) for target, anchor in LINK_TO_SECTION.findall(text)]
    return [f"{at.name}#{anchor}" for at, anchor in found if anchor not in anchors(at.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_to_sections_lead_to_headings(page):
    assert sections_without_heading(page, page.read_text()) == []


def test_a_section_that_only_the_site_finds_is_found():
    """GitHub keeps all hyphens of a heading `--search`, and the site one."""
    assert anchors("# A page\n## `--search`\n## A [link](b.md), and `code`\n") == {"a-page", "a-link-and-code"}
    page = ROOT / "docs" / "plan.md"
    assert sections_without_heading(page, "[a](tpu.md#none), [b](#flops)") == ["tpu.md#none"]


def test_pictures_have_no_white_background_and_no_black():
    """They fit light and dark pages."""
    for path in (ROOT / "docs" / "figures").glob("*.svg"):
        assert not re.search('style="fill: #ffffff"|#000000', path.read_text()), path


def test_make_targets_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {line.split()[1] for page in PAGES for line in commands(page.read_text()) if line.startswith("make ")}
    assert {"demo", "test"} <= shown <= targets
