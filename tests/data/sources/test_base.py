import dataclasses
import hashlib
import os
import sysconfig
from pathlib import Path

import draccus
import pytest

from gregale.data.config import DataConfig
from gregale.data.sources import SourceConfig, TextSource
from gregale.data.sources.base import code_of, expand
from gregale.errors import UserError


def test_every_choice_parses_from_a_mapping():
    text = {"type": "text", "files": ["a/*.txt"], "exclude": ["*/b/*"], "weight": 2}
    config = draccus.decode(DataConfig, {"sources": {"x": text}})
    assert config.sources["x"] == TextSource(files=("a/*.txt",), exclude=("*/b/*",), weight=2.0)
    assert set(SourceConfig.get_known_choices()) == {
        *("text", "jsonl", "csv", "tsv", "parquet", "tokens", "huggingface"),
        *("chat", "chat_csv", "chat_parquet", "chat_huggingface"),
    }


def test_patterns_expand(monkeypatch):
    monkeypatch.setenv("CORPUS", "/corpus")
    assert expand("$CORPUS/a") == "/corpus/a"
    assert expand("~/a") == os.path.expanduser("~") + "/a"
    assert expand("{stdlib}/os.py") == sysconfig.get_path("stdlib") + "/os.py"


def test_files_come_by_pattern_then_by_name_and_once(tmp_path, contents):
    for name in ("b.txt", "a.txt", "c/d.txt", "c/skip/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    source = TextSource(files=(f"{tmp_path}/c/**/*.txt", f"{tmp_path}/**/*.txt"), exclude=("*/skip/*",))
    assert contents(source) == ["c/d.txt", "a.txt", "b.txt"]


def test_identity_follows_the_files_but_not_the_weight(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    source = TextSource(files=(f"{tmp_path}/*.txt",))
    before = source.identity()
    assert dataclasses.replace(source, weight=5.0).identity() == before
    assert dataclasses.replace(source, separator="x").identity() != before
    (tmp_path / "a.txt").write_text("three")
    assert source.identity() != before


def test_a_source_without_files_is_refused():
    for source, message in (
        (TextSource(), "files: empty"),
        (TextSource(files=("/nowhere/*.txt",)), r"files: no file matches /nowhere/\*\.txt"),
        (TextSource(files=(__file__,), exclude=("*.py",)), r"exclude: \*\.py leaves none of the 1 matching"),
    ):
        with pytest.raises(UserError, match=message):
            source.parts()


def test_what_is_no_pattern_of_files_is_told_with_what_would_be(tmp_path, monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    (tmp_path / "a[1].txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    for wrong, message in (
        (f"{tmp_path}/a[1].txt", f"files: {tmp_path}/a[1].txt is a file, but as a pattern it does not match that name, "
         f"for [ ] stands for one character of those between. Write {tmp_path}/a[[]1].txt."),
        (f"{tmp_path}/", f"files: {tmp_path}/ is a folder, and patterns of files are needed: {tmp_path}/**/* matches "),
        ("${NOWHERE}/*", "files: ${NOWHERE}/* has the variable NOWHERE, which is not set in the environment. Set it"),
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            TextSource(files=(f"{tmp_path}/b.txt", wrong)).parts()
        assert str(caught.value).startswith(message)
    assert [*TextSource(files=(f"{tmp_path}/a[[]1].txt",)).found()] == [f"{tmp_path}/a[1].txt"]


def test_fields_out_of_range_are_refused():
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"weight is .*; it has to be (at least 0|from 0 to)"):
            TextSource(weight=weight)
    with pytest.raises(UserError, match=r"on_bad_document is 'ignore'\. Valid choices: stop, skip"):
        TextSource(on_bad_document="ignore")


class Own(TextSource):
    """A source of one's own."""


def test_documents_of_ones_own_code_are_others_with_other_code():
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    assert (code_of(Own), code_of(TextSource)) == ({"code": code}, {})
