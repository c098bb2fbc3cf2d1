"""Each file counts once, whatever links and patterns lead to it, and all else is as Python's own glob has it."""

import glob
import os

import pytest

from gregale.data.sources import TextSource
from gregale.data.sources.base import each_once, matches

FILES = ("a.txt", "b.md", "c/d.txt", "c/e/f.txt", "c/.hidden.txt", ".git/x.txt", "g[1]/h.txt", "c/e/c/i.txt")
PATTERNS = ("**/*.txt", "**", "**/", "*", "c/**/c/*.txt", "**/c/**/*.txt", "**/.git/*", "g[[]1]/**", "c//**//*.txt",
            "./**/f.txt", "none/**", "a.txt/**", "[ac]*", "*/**/e/*", "**/**/*.txt")  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("pattern", PATTERNS)
def test_without_cycles_it_is_pythons_glob(folder, pattern):
    for whole in (pattern, f"{folder}/{pattern}"):
        expected = {each for each in glob.glob(whole, recursive=True) if os.path.isfile(each)}
        assert {each for each in matches(whole) if os.path.isfile(each)} == expected


def test_a_link_to_a_folder_elsewhere_is_followed(folder):
    (folder / "c" / "link").symlink_to(folder / "g[1]")
    assert sorted(matches("c/**/*.txt")) == sorted(glob.glob("c/**/*.txt", recursive=True))
    assert "c/link/h.txt" in set(matches("c/**/*.txt"))


def test_cycles_of_links_multiply_no_file(folder, contents):
    before = contents(TextSource(files=("**/*.txt",)))
    for number, place in enumerate(("c", "c/e", "g[1]")):  # 40 levels with three ways each, for Python's glob
        (folder / place / f"0{number}").symlink_to(folder)
    assert contents(TextSource(files=("**/*.txt",))) == before
    assert len(before) == 5


def test_a_file_with_several_names_counts_once(folder, contents):
    os.link(folder / "a.txt", folder / "z.txt")
    (folder / "0.txt").symlink_to("a.txt")
    (folder / "0").symlink_to("c")
    patterns = ("*.txt", "./a.txt", str(folder / "a.txt"), "**/*.txt", "c/*.txt")
    assert contents(TextSource(files=patterns)) == ["a.txt", "c/d.txt", "c/e/c/i.txt", "c/e/f.txt", "g[1]/h.txt"]
    found = TextSource(files=("*.txt", "0/**/*.txt"), exclude=("a.txt", "z.txt")).found()
    assert list(found) == ["0.txt", "0/d.txt", "0/e/c/i.txt", "0/e/f.txt"], (
        "what is excluded takes no other name with it"
    )


def test_what_is_gone_has_only_its_name(folder):
    assert each_once(["gone", "a.txt", "gone too"]) == ["gone", "a.txt", "gone too"]
