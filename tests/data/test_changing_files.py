"""A file that another program writes while it is encoded: nothing of it is kept under the file's old identity."""

import os

import pyarrow
import pyarrow.parquet
import pytest

from gregale.data.build import identity_of, store_key
from gregale.data.config import DataConfig
from gregale.data.preparation import prepare
from gregale.data.sources import CsvSource, JsonLinesSource, ParquetSource, TextSource, TokensSource
from gregale.data.tokenizers import BpeConfig, BytesTokenizer
from gregale.errors import UserError
from gregale.storage import storage_path, write_bytes
from tests.data.conftest import build

LINES = b'{"text": "old"}\n' * 9
CHANGED = r"b\.jsonl changed while it was read: its text would be partly old and partly new\."


def writing_at(monkeypatch, method: str, path: str, content: bytes) -> None:
    """Let another program write a file when a source first calls a method for it."""
    called, written = getattr(JsonLinesSource, method), []

    def then_written(self, *arguments):
        if not written and any(path in (each, getattr(each, "path", None)) for each in arguments):
            written.append(write_bytes(storage_path(path), content))
        return called(self, *arguments)

    monkeypatch.setattr(JsonLinesSource, method, then_written)


@pytest.mark.parametrize("where", ["disk", "store"])
@pytest.mark.parametrize(("change", "method"), [(b"more", "scan"), (b"", "scan"), (LINES * 2, "split")])
def test_a_store_is_not_completed_and_the_next_build_has_the_new_text(
    request, tmp_path, monkeypatch, where, change, method
):
    root = str(tmp_path if where == "disk" else request.getfixturevalue("s3"))
    for name in "ab":
        write_bytes(storage_path(f"{root}/{name}.jsonl"), LINES)
    source = JsonLinesSource(files=(f"{root}/*.jsonl",), on_bad_document="skip")
    folder = tmp_path / "cache" / store_key(identity_of(source, BytesTokenizer()))
    message = CHANGED if method == "scan" else "one of its files changed while it was read"
    with monkeypatch.context() as patch:
        writing_at(patch, method, f"{root}/b.jsonl", change)
        with pytest.raises(UserError, match=message):
            build(source, tmp_path / "cache")
    assert not list(folder.glob("*")), "no part with new text, and no store"
    store = build(source, tmp_path / "cache")
    assert store.folder != folder
    assert len(store.offsets) - 1 == 9 + change.count(b"old")


@pytest.mark.parametrize("kind", [JsonLinesSource, TextSource, CsvSource, TokensSource, ParquetSource])
@pytest.mark.parametrize("method", ["scan", "split"])
def test_a_file_that_becomes_a_pipe_is_not_waited_for(tmp_path, monkeypatch, kind, method):
    """Without a program that writes to it, an open of a pipe waits for ever."""
    path, called = tmp_path / "b", getattr(kind, method)
    path.write_bytes(LINES)

    def replaced(self, *arguments):
        if path.is_file():
            path.unlink()
            os.mkfifo(path)
        return called(self, *arguments)

    if kind is ParquetSource:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), path)
    monkeypatch.setattr(kind, method, replaced)
    with pytest.raises(UserError, match="b is a pipe or a device"):
        build(kind(files=(str(path),)), tmp_path / "cache")


def test_a_file_that_is_damaged_because_it_changes_is_said_to_change(tmp_path, monkeypatch):
    (tmp_path / "b.jsonl").write_bytes(LINES)
    source = JsonLinesSource(files=(f"{tmp_path}/*.jsonl",))
    writing_at(monkeypatch, "scan", f"{tmp_path}/b.jsonl", b'{"text": "cut')
    with pytest.raises(UserError, match=CHANGED):
        build(source, tmp_path / "cache")


@pytest.mark.parametrize("method", ["scan", "split"])
def test_a_bpe_of_text_that_changes_is_not_kept(tmp_path, monkeypatch, method):
    (tmp_path / "b.jsonl").write_bytes(LINES)
    source = JsonLinesSource(files=(f"{tmp_path}/*.jsonl",))
    config = DataConfig({"x": source}, BpeConfig(vocabulary=260), cache=str(tmp_path / "cache"), workers=1)
    with monkeypatch.context() as patch:
        writing_at(patch, method, f"{tmp_path}/b.jsonl", LINES * 3)
        with pytest.raises(UserError, match=r"data\.sources.* changed while it was read"):
            prepare(config, 4, 0)
    assert not list((tmp_path / "cache").glob("tokenizer*/*"))
    assert prepare(config, 4, 0).training_tokens > 0
