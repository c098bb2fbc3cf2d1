import csv
import gzip
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gregale.data.sources import CsvSource, TsvSource
from gregale.errors import UserError
from tests.data.conftest import read

TEXTS = ['a "quoted", word', "zwei ü", "three\nlines\r\nhere", "x" * 200_000, " spaced "]


def written(rows, **options) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, **options).writerows(rows)
    return text.getvalue().encode()


def source_of(tmp_path, data: bytes, name="a.csv", kind=CsvSource, **fields):
    (tmp_path / name).write_bytes(data)
    return kind(files=(str(tmp_path / name),), **fields)


ROWS = [["id", "text"], *([str(number), text] for number, text in enumerate(TEXTS))]


@pytest.mark.parametrize(("name", "pack"), [("a.csv", bytes), ("a.csv.gz", gzip.compress)])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_records_of_a_writer_come_back_with_quotes_and_line_breaks(tmp_path, contents, name, pack, end):
    data = b"\xef\xbb\xbf" + written(ROWS, lineterminator=end)
    assert contents(source_of(tmp_path, pack(data), name)) == TEXTS


def test_without_header_the_column_is_a_number_and_empty_lines_are_no_records(tmp_path, contents):
    data = b"1,one\n\n2,two\n"
    source = source_of(tmp_path, data, header=False, column="2")
    assert contents(source) == ["one", "two"]
    assert [document.start for document in source.documents()] == [1, 3]
    with pytest.raises(UserError, match="column is 'text', but header is false: give its number, from 1"):
        CsvSource(header=False)


def test_in_tsv_a_quote_is_a_character_unless_quotes_are_set(tmp_path, contents):
    data = b'id\ttext\n1\t"so" he said\n2\ta, b\n'
    assert contents(source_of(tmp_path, data, "a.tsv", TsvSource)) == ['"so" he said', "a, b"]
    data = written(ROWS, delimiter="\t")
    assert contents(source_of(tmp_path, data, "a.tsv", TsvSource, quotes=True)) == TEXTS


BAD = [
    (b"id,text\n1,a\n2\n3,b\n", "line 3: 1 values, expected 2, as the header", ["a", "b"]),
    (b'id,text\n1,"a\nb"\n2,x,y\n3,b\n', "line 4: 3 values, expected 2, as the header", ["a\nb", "b"]),
    (b"id,text\n1,\xff\n\xfe,b\n", "line 2: the byte 0xff of the text is not UTF-8", ["b"]),
    (b'id,text\n1,a\n2,"b" c\n3,d\n', r"line 3: not CSV \(',' expected after '\"'\)", ["a", "d"]),
    (b'id,text\n1,a\n2,"b\n3,d\n', r"line 3: not CSV \(unexpected end of data\)", ["a"]),
]


@pytest.mark.parametrize(("data", "message", "rest"), BAD)
def test_a_bad_record_is_named_with_its_first_line_and_may_be_skipped(tmp_path, data, message, rest):
    with pytest.raises(UserError, match=rf"a\.csv, {message}"):
        list(source_of(tmp_path, data).documents())
    found, skipped = read(source_of(tmp_path, data, on_bad_document="skip"))
    assert (found, skipped.count) == (rest, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"id,body\n1,a\n", "no column is named `text`; the columns are: id, body"),
        (b"text,text\n1,a\n", "several columns are named `text`; the columns are: text, text"),
        (b"\n", "empty, expected a header"),
    ],
)
def test_a_header_without_the_column_is_refused(tmp_path, data, message):
    with pytest.raises(UserError, match=rf"a\.csv: {message}"):
        list(source_of(tmp_path, data).documents())


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8), max_size=6))
def test_any_text_comes_back(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("csv")
    source = source_of(folder, written([["text"], *([text] for text in texts)], quoting=csv.QUOTE_ALL))
    assert [document.content for document in source.documents()] == texts
