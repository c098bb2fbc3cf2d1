"""The site builds without a warning, has every key and every module, and fetches nothing from elsewhere."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import griffe
import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config

from gregale.runs.config import TrainConfig
from gregale.settings.decoding import counterparts, entries
from gregale.tracking.metrics import METRICS
from tests.docs.pages import ROOT, page_tables

FETCHED = re.compile(
    r"""<(?:script|img|iframe)[^>]*\bsrc=["']?(?:https?:)?//|<link[^>]*stylesheet[^>]*href=["']?http"""
)
PACKAGE = ROOT / "src" / "gregale"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site with the code reference's headings alone: the members of 300 modules take most of a build's time."""
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path_factory.mktemp("site")), strict=True)
    plugin = config.plugins["mkdocstrings"].config
    plugin["handlers"]["python"]["options"] |= {"show_submodules": False, "members": False}
    build(config)
    return Path(config.site_dir)


@pytest.mark.soak
def test_the_whole_site_builds_and_has_every_module(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    reference = "".join(page.read_text() for page in (tmp_path / "reference").rglob("index.html"))
    assert not [module for module in modules() if f'id="{module}"' not in reference]
    assert not [page for page in tmp_path.rglob("*.html") if FETCHED.search(page.read_text())]


def test_the_tables_of_pages_are_those_of_the_code():
    tables = page_tables()
    for page in tables.PARTS:
        text = (ROOT / "docs" / page).read_text()
        assert tables.filled(page, text) == text, "run `python docs/hooks/tables.py`"


def test_every_key_has_its_line(site):
    page = unescape((site / "configuration" / "index.html").read_text())
    missing = [entry.key for entry in entries(TrainConfig) if f"<code>{entry.key}</code>" not in page]
    assert not missing


def test_every_metric_has_its_line(site):
    page = unescape((site / "metrics" / "index.html").read_text())
    assert not [metric.name for metric in METRICS if f"<code>{metric.name}</code>" not in page]


def test_every_key_of_another_project_has_its_line(site):
    page = unescape((site / "migration" / "index.html").read_text())
    assert not [row for row in counterparts() if f"<code>{row.theirs}</code>" not in page]


def modules() -> list[str]:
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    names = {".".join(("gregale", *path.parts)).removesuffix(".__init__") for path in paths} - {"gregale"}
    return sorted(name for name in names if not name.endswith(".__main__"))


def test_every_module_lies_below_one_of_the_reference():
    """With `show_submodules` a page's package has all modules in it."""
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    documented = {f"{name}." for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}
    assert not [module for module in modules() if not any(f"{module}.".startswith(each) for each in documented)]


def test_every_docstring_is_parsed(caplog):
    """Griffe warns of a section that it cannot read, and of a parameter that the signature lacks."""
    extensions = griffe.load_extensions(ROOT / "docs" / "hooks" / "docstrings.py")
    left = [griffe.load("gregale", search_paths=[PACKAGE.parent], extensions=extensions)]
    assert isinstance(left[0], griffe.Module)
    while left:
        found = left.pop()
        if found.docstring is not None:
            found.docstring.parse("google")
        left += [each for each in found.members.values() if not each.is_alias]
    assert caplog.messages == []


def pages_of_nav(nav: list) -> list[str]:
    """Return the pages of mkdocs.yml's menu, without the index; of the code reference only the first."""
    groups = [target for entry in nav for target in entry.values() if isinstance(target, list)]
    pages = [page for group in groups for entry in group for page in entry.values()]
    return [page for page in pages if not page.startswith("reference/")] + ["reference/axes.md"]


def test_the_index_has_the_pages_of_the_menu_in_its_order():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    index = re.findall(r"^\| \[[^\]]+\]\(([\w/]+\.md)\)", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    assert index == pages_of_nav(nav)


def test_the_menu_has_every_page():
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert not [page for page in pages if f": {page}" not in nav]


def test_nothing_is_fetched_from_elsewhere(site):
    fetching = [page for page in site.rglob("*.html") if FETCHED.search(page.read_text())]
    assert not fetching
    assert not (site / "hooks").exists()


def test_something_fetched_would_be_found():
    assert FETCHED.search('<script async src="https://example.org/a.js">')
    assert FETCHED.search('<link rel="stylesheet" href="https://example.org/a.css">')
