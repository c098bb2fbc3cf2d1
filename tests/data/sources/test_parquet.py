import dataclasses
import sys

import pyarrow
import pyarrow.parquet
import pytest

from gregale.data.sources import ParquetSource, Skipped
from gregale.errors import UserError


def write(path, columns, **options):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return ParquetSource(files=(str(path),))


def test_rows_in_order_over_row_groups(tmp_path, contents):
    texts = [f"text {number}" for number in range(10)]
    source = write(tmp_path / "a.parquet", {"text": texts, "other": list(range(10))}, row_group_size=4)
    assert len(source.parts()) == 3
    assert contents(source) == texts
    assert [document.start for document in source.documents()] == list(range(10))


def test_a_missing_column_is_named(tmp_path):
    source = write(tmp_path / "a.parquet", {"body": ["a"], "url": ["b"]})
    with pytest.raises(UserError, match=r"a\.parquet: no column `text`; the columns are: body, url"):
        list(source.documents())


@pytest.mark.parametrize(("value", "found"), [(None, r"empty \(null\)"), (3, "int")])
def test_a_value_that_is_no_text_is_named_with_its_row(tmp_path, value, found):
    values = ["a", "b", "c", None] if value is None else [value] * 4
    source = write(tmp_path / "a.parquet", {"text": values}, row_group_size=3)
    row = 3 if value is None else 0
    with pytest.raises(UserError, match=rf"a\.parquet, row {row}: column `text` is {found}, expected text"):
        list(source.documents())


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match=r"a\.parquet: not a Parquet file, or a damaged one"):
        ParquetSource(files=(str(tmp_path / "a.parquet"),)).parts()


def test_damage_inside_is_refused_with_its_row_group(tmp_path):
    source = write(tmp_path / "a.parquet", {"text": [f"{n} text" * 50 for n in range(500)]}, use_dictionary=False)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[10 : len(data) // 2] = b"\xff" * (len(data) // 2 - 10)
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.parquet, row group 0, near row 0: damaged"):
        list(source.documents())


def test_parquet_without_its_library_asks_for_the_extra(tmp_path, monkeypatch):
    source = write(tmp_path / "a.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"a\.parquet: Parquet files need the extra `formats`\. Run `"):
        source.parts()


def skipping(source):
    """The texts that a source has when it skips what is bad, and what that was."""
    source, skipped = dataclasses.replace(source, on_bad_document="skip"), Skipped()
    return [document.content for part in source.parts() for document in source.read(part, skipped)], skipped


def test_a_bad_row_is_skipped_by_itself(tmp_path):
    raw = pyarrow.array([b"a", b"\xff", b"c", None, b"e"]).cast(pyarrow.string(), safe=False)
    source = write(tmp_path / "a.parquet", {"text": raw})
    with pytest.raises(UserError, match=r"a\.parquet, row 1: column `text` is not UTF-8"):
        list(source.documents())
    texts, skipped = skipping(source)
    assert texts == ["a", "c", "e"]
    assert [place.partition(": ")[0][-5:] for place in skipped.first] == ["row 1", "row 3"]


def test_a_file_that_is_no_parquet_is_skipped_whole(tmp_path):
    write(tmp_path / "a.parquet", {"text": ["a"]})
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    texts, skipped = skipping(ParquetSource(files=(f"{tmp_path}/*.parquet",)))
    assert (texts, skipped.count) == (["a"], 1)


def test_a_name_that_is_not_utf8_is_damage(tmp_path):
    source = write(tmp_path / "a.parquet", {"text": ["a"]}, store_schema=False)
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data.replace(b"text", b"te\xf8t"))
    with pytest.raises(UserError, match=r"a\.parquet"):
        list(source.documents())
