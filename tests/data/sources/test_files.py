"""Files on a disk and objects in a store are found and read alike."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from gregale.data.sources import JsonLinesSource, ParquetSource, TextSource, TokensSource, tables, text
from gregale.data.sources.base import files_of
from gregale.errors import UserError

NAMES = ["a.txt", "b.txt", "a/a.txt", "a/b.txt", "a/x.md", "a/deep/b.txt", "c[1].txt"]
PATTERNS = ["*.txt", "**/*.txt", "a/[ab].txt", "a/[!a].txt", "?.txt", "**", "a/**/b.txt", "a/*", "b.txt", "none*", "a"]
LINES = "".join(json.dumps({"text": f"line {number} ü"}) + "\n" for number in range(40)).encode()


def test_patterns_mean_the_same_in_a_store_and_on_a_disk(tmp_path, s3):
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
        (s3 / name).write_bytes(name.encode())
    for pattern in PATTERNS:
        near = [path.removeprefix(f"{tmp_path}/") for path in files_of(f"{tmp_path}/{pattern}")]
        far = [path.removeprefix(f"{s3}/") for path in files_of(f"{s3}/{pattern}")]
        assert far == near, pattern


@pytest.fixture
def formats(tmp_path):
    """A file of each format, and the source that reads it."""
    table = pyarrow.table({"text": [f"row {number}" for number in range(30)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    ids = np.array([[number, number + 1, 0] for number in range(1, 200)], np.uint16).ravel()
    ids.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", ids.astype(np.int32))
    (tmp_path / "a.txt").write_bytes("<e>".join(f"\ufeffdocument {number} ü" for number in range(50)).encode())
    for name, content in (("a.jsonl", LINES), ("a.gz", gzip.compress(LINES)), ("a.zst", zstandard.compress(LINES))):
        (tmp_path / name).write_bytes(content)
    return {
        "a.txt": lambda path: TextSource(files=(path,), separator="<e>"),
        "a.jsonl": lambda path: JsonLinesSource(files=(path,)),
        "a.gz": lambda path: JsonLinesSource(files=(path,)),
        "a.zst": lambda path: JsonLinesSource(files=(path,)),
        "a.parquet": lambda path: ParquetSource(files=(path,)),
        "a.bin": lambda path: TokensSource(files=(path,), end_of_document=0),
        "a.npy": lambda path: TokensSource(files=(path,), end_of_document=0),
    }


def test_every_format_reads_alike_from_a_store(formats, tmp_path, s3, contents, monkeypatch):
    monkeypatch.setattr(text, "PART_BYTES", 100)
    monkeypatch.setattr(tables, "PART_TOKENS", 100)
    monkeypatch.setattr(tables, "READ_TOKENS", 150)
    for name, source in formats.items():
        (s3 / name).write_bytes((tmp_path / name).read_bytes())
        near, far = source(str(tmp_path / name)), source(str(s3 / name))
        assert contents(far) == contents(near), name
        assert len(contents(far)) >= 30
        assert len(far.parts()) == len(near.parts()) > (0 if name in ("a.gz", "a.zst") else 2)
    assert far.identity()["files"][0][:2] == [str(s3 / name), (tmp_path / name).stat().st_size]


def test_objects_have_an_identity_that_changes_and_mistakes_name_them(s3):
    with pytest.raises(UserError, match=r"files: no file matches s3://bucket/\w+/\*\.txt"):
        TextSource(files=(f"{s3}/*.txt",)).parts()
    (s3 / "a.txt").write_bytes(b"one")
    source = TextSource(files=(f"{s3}/*.txt",))
    before, (part,) = source.identity(), source.parts()
    assert source.identity() == before
    (s3 / "a.txt").write_bytes(b"two")
    assert source.identity() != before
    (s3 / "a.txt").unlink()
    with pytest.raises(UserError, match=r"a\.txt: cannot be read \(there is no such object\)"):
        list(source.scan(part))
    (s3 / "a.jsonl").write_bytes(LINES + b"bad\n")
    with pytest.raises(UserError, match=r"s3://bucket/\w+/a\.jsonl, line 41: not JSON"):
        list(JsonLinesSource(files=(f"{s3}/a.jsonl",)).documents())
