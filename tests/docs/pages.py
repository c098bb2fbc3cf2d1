"""The pages that a reader sees, and the fenced blocks in them."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages that are carried out from begin to end, their commands too (`test_snippets`).
WALKS = [ROOT / "docs" / "huggingface.md"]
API = ROOT / "docs" / "api.md"  # its Python runs in tests/programs/test_python_api.py
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page, each with its language before it."""
    return [(language, body) for _, language, body in FENCE.findall(text)]


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of some languages."""
    return [body for language, body in fences(text) if language in languages]


def pages_with(*languages: str) -> list[Path]:
    return [page for page in PAGES if blocks(page.read_text(), *languages)]


def headings(text: str) -> list[str]:
    """The headings of a page as a reader sees them, without the marks of code and links."""
    marked = re.findall(r"^#{1,6} (.+)$", FENCE.sub("", text), re.MULTILINE)
    return [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in marked]


def commands(text: str) -> list[str]:
    """The command lines that a page shows, prompts and continuation lines resolved."""
    lines = []
    for block in blocks(text, "bash", "console", "shell", "sh"):
        lines += [line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines()]
    return [line.strip() for line in lines]


def page_tables() -> ModuleType:
    """The module that writes the tables of pages."""
    spec = importlib.util.spec_from_file_location("page_tables", ROOT / "docs" / "hooks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
