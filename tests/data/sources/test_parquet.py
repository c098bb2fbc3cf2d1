import dataclasses
import sys

import pyarrow
import pyarrow.parquet
import pytest

from gregale.data.sources import ParquetSource
from gregale.errors import UserError
from tests.data.conftest import read


def write(path, columns, **options):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return ParquetSource(files=(str(path),))


def test_rows_in_order_over_row_groups_with_the_extra_installed(tmp_path, contents, monkeypatch):
    texts = [f"text {number}" for number in range(10)]
    source = write(tmp_path / "a.parquet", {"text": texts, "other": list(range(10))}, row_group_size=4)
    assert len(source.parts()) == 3
    assert contents(source) == texts
    assert [document.start for document in source.documents()] == list(range(10))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"a\.parquet: Parquet files need the extra `formats`\. Run `"):
        source.parts()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"], "url": ["b"]}, ": no column `text`; the columns are: body, url"),
        ({"text": ["a", "b", "c", None]}, r", row 3: column `text` is empty \(null\), expected text"),
        ({"text": [3] * 4}, ", row 0: column `text` is int, expected text"),
    ],
)
def test_a_value_that_is_no_text_is_named_with_its_place(tmp_path, columns, message):
    source = write(tmp_path / "a.parquet", columns, row_group_size=3)
    with pytest.raises(UserError, match=rf"a\.parquet{message}"):
        list(source.documents())


def test_damage_inside_is_refused_with_its_row_group(tmp_path):
    source = write(tmp_path / "a.parquet", {"text": [f"{n} text" * 50 for n in range(500)]}, use_dictionary=False)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[10 : len(data) // 2] = b"\xff" * (len(data) // 2 - 10)
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.parquet, row group 0, near row 0: damaged"):
        list(source.documents())


def skipping(source):
    """The texts that a source has when it skips what is bad, and what that was."""
    return read(dataclasses.replace(source, on_bad_document="skip"))


def test_a_bad_row_is_skipped_by_itself(tmp_path):
    raw = pyarrow.array([b"a", b"\xff", b"c", None, b"e"]).cast(pyarrow.string(), safe=False)
    source = write(tmp_path / "a.parquet", {"text": raw})
    with pytest.raises(UserError, match=r"a\.parquet, row 1: column `text` is not UTF-8"):
        list(source.documents())
    texts, skipped = skipping(source)
    assert texts == ["a", "c", "e"]
    assert [place.partition(": ")[0][-5:] for place in skipped.first] == ["row 1", "row 3"]


def test_a_file_that_is_no_parquet_is_refused_or_skipped_whole(tmp_path):
    write(tmp_path / "a.parquet", {"text": ["a"]})
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    source = ParquetSource(files=(f"{tmp_path}/*.parquet",))
    with pytest.raises(UserError, match=r"b\.parquet: not a Parquet file, or a damaged one"):
        source.parts()
    texts, skipped = skipping(source)
    assert (texts, skipped.count) == (["a"], 1)


def test_a_name_that_is_not_utf8_is_damage(tmp_path):
    source = write(tmp_path / "a.parquet", {"text": ["a"]}, store_schema=False)
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data.replace(b"text", b"te\xf8t"))
    with pytest.raises(UserError, match=r"a\.parquet"):
        list(source.documents())


def test_a_column_inside_of_a_struct_is_named_with_dots(tmp_path, contents):
    path = tmp_path / "a.parquet"
    columns = {"a": [{"text": "one", "b": {"c": "x"}}, None, {"text": None, "b": {"c": "y"}}], "a.b": ["p", "q", "r"]}
    source = write(path, columns)
    found, skipped = skipping(dataclasses.replace(source, column="a.text"))
    assert found == ["one"]
    assert [line.partition(", ")[2] for line in skipped.first] == [
        f"row {row}: column `a.text` is empty (null), expected text." for row in (1, 2)
    ]
    assert skipping(dataclasses.replace(source, column="a.b.c"))[0] == ["x", "y"]
    assert contents(dataclasses.replace(source, column="a.b")) == ["p", "q", "r"], "a column of that very name"
    with pytest.raises(UserError, match=r"no column `a\.text\.z`; the columns are: a, a\.b"):
        contents(dataclasses.replace(source, column="a.text.z"))


def test_two_columns_of_one_name_are_refused(tmp_path, contents):
    inner = pyarrow.StructArray.from_arrays([pyarrow.array(["x"])] * 2, ["c", "c"])
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"]), pyarrow.array(["y"]), inner], ["text", "text", "a"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for column in ("text", "a.c"):
        with pytest.raises(UserError, match=rf"several columns `{column}`; the columns are: text, text, a"):
            contents(ParquetSource(files=(f"{tmp_path}/a.parquet",), column=column))
