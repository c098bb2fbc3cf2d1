"""Words that the glossary replaced do not return: as names in the code, or in the pages."""

import ast
import re

from tests.docs.pages import ROOT

NAMES = """
AllHands AroundPsdp Asking Consumed Crew Disk DiskShelf Doing DoneParts Door Elsewhere Heir Hands LastingStream
LateParts Leasing Legs Lost Lot Moment NoAnswer NotAsRecorded ObjectShelf Offered OuterSide Overtaken Patience RoundBook
RunPlaces Seal Shelf Shortage Showing Sides Spent Standing Taken Turns Verdict Weighed compiled_once hanging leased
noted_checkpoint parameters_only patiently put_together renewed says set_aside token_pieces way_to where_it_goes_on
"""
RETIRED_NAMES = frozenset(NAMES.split())
RETIRED_WORDS = re.compile(r"\b(crew|foretold|heir|of late|roll call|whoever)\b", re.IGNORECASE)


def defined_names(tree: ast.AST) -> set[str]:
    """Return the names of all classes and functions in a module."""
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def test_no_class_or_function_has_a_retired_name():
    for path in (ROOT / "src" / "gregale").rglob("*.py"):
        assert not defined_names(ast.parse(path.read_text())) & RETIRED_NAMES, path


def test_a_retired_name_is_found():
    assert defined_names(ast.parse("class A:\n    def says(self): ...")) & RETIRED_NAMES == {"says"}


def test_no_page_has_a_retired_word():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert RETIRED_WORDS.findall(page.read_text()) == [], page


def test_the_glossary_defines_a_term_once():
    """Terms that share a row are separated by commas."""
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    terms = [term for row in rows if row != "term" for term in row.split(", ")]
    assert len(terms) > 60
    assert sorted(terms) == sorted(set(terms))


def test_sections_that_the_code_names_are_headings_of_pages():
    """The code names pages of the repository only, a section as `docs/design.md, "Heading"`."""
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")):
        text = path.read_text()
        assert "DESIGN" not in text, path
        for page, heading in re.findall(r'(docs/\w+\.md), "([^"]+)"', text):
            assert re.search(rf"^#+ {re.escape(heading)}$", (ROOT / page).read_text(), re.MULTILINE), (path, heading)
