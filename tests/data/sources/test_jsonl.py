import gzip
import json
import sys

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gregale.data.sources import JsonLinesSource, Skipped, SourceRange
from gregale.errors import UserError
from tests.data.conftest import cut, read

TEXTS = ["one", "zwei ü", "drei\nlines", ""]
LINES = "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in TEXTS).encode()


def source_of(tmp_path, data, name="a.jsonl", **fields):
    (tmp_path / name).write_bytes(data)
    return JsonLinesSource(files=(str(tmp_path / name),), **fields)


def two_frames(data):
    return zstandard.compress(data[:20]) + zstandard.compress(data[20:])


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.jsonl", bytes), ("a.gz", gzip.compress), ("a.zst", zstandard.compress), ("b.zst", two_frames)],
)
@pytest.mark.parametrize(
    "data", [LINES.rstrip(b"\n"), LINES.replace(b"\n", b"\n\n"), b"\xef\xbb\xbf" + LINES, b"\xef\xbb\xbf\n" + LINES]
)
def test_plain_and_compressed_files_read_alike(tmp_path, contents, name, pack, data):
    assert contents(source_of(tmp_path, pack(data), name)) == TEXTS


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"", b'{"text": "a"}', b'{"text": "bcdef"}'])), st.lists(st.integers(1, 60)))
def test_any_cut_into_parts_gives_every_line_once(tmp_path_factory, lines, cuts):
    data = b"\n".join(lines)
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes(data)
    source = JsonLinesSource(files=(str(path),))
    found = [document for part in cut(path, len(data), cuts) for document in source.read(part, Skipped())]
    assert [one.content for one in found] == [json.loads(line)["text"] for line in lines if line]
    assert [one.start for one in found] == [
        sum(len(before) + 1 for before in lines[:number]) for number, line in enumerate(lines) if line
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"line 3: not JSON \(Expecting ',' delimiter at column 13\)"),
        (b'"text"', r"line 3: found str, expected a JSON object with field `text`"),
        (b'{"body": "a"}', r"line 3: no field `text`; the fields of this line are: body"),
        (b'{"text": 7}', r"line 3: field `text` is int, expected text"),
        (b'{"text": "\xff"}', r"line 3: byte 10 of the line, 0xff, is not UTF-8"),
        (b'{"text": "\\ud800"}', r"line 3: character 0 of the text is U\+D800"),
        (b"[" * 100_000, r"line 3: .*nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    data = b'{"text": "good"}\n\n' + line + b"\n"
    for source in (source_of(tmp_path, data), source_of(tmp_path, gzip.compress(data), "a.gz")):
        with pytest.raises(UserError, match=message):
            list(source.documents())


def test_the_line_is_counted_in_the_whole_file_not_in_the_part(tmp_path):
    data = b'{"text": "good"}\n' * 9 + b"bad\n"
    source = source_of(tmp_path, data)
    with pytest.raises(UserError, match="line 10: not JSON"):
        list(source.read(SourceRange(source.files[0], 40, len(data), len(data) - 40), Skipped()))


def test_zst_without_its_library_asks_for_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"a\.zst: zstd files need the extra `formats`\. Run `"):
        list(source_of(tmp_path, zstandard.compress(LINES), "a.zst").documents())


def test_a_number_of_thousands_of_digits_is_no_mistake(tmp_path, contents):
    line = b'{"text": "a", "n": %s}\n' % (b"7" * 5001)
    assert contents(source_of(tmp_path, line)) == ["a"]
    with pytest.raises(UserError, match="line 1: field `n` is int, expected text"):
        contents(source_of(tmp_path, line, field="n"))


LONG = b"7" * 5001
BAD_LINES = [b"\xff", LONG, b'{"text": ' + LONG + b"}", b"{", b"[]", b'{"text": "\\udfff"}', b'{"\\ud800": 1}']


@settings(deadline=None)
@given(st.lists(st.one_of(st.sampled_from([b'{"text": "a"}', *BAD_LINES]), st.binary(max_size=20)), max_size=8))
def test_any_bytes_are_documents_or_bad_ones(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    found, skipped = read(JsonLinesSource(files=(str(path),), on_bad_document="skip"))
    stripped = [line.removeprefix(b"\xef\xbb\xbf").strip() for line in path.read_bytes().split(b"\n")]
    assert len(found) + skipped.count == sum(map(bool, stripped))
    assert len(found) >= lines.count(b'{"text": "a"}')
    assert len(skipped.first) == min(skipped.count, 5)
    "".join(skipped.first).encode("utf-8")
    if skipped.count:
        with pytest.raises(UserError) as caught:
            list(JsonLinesSource(files=(str(path),)).documents())
        assert str(caught.value).encode("utf-8", "backslashreplace").decode() == skipped.first[0]


@pytest.mark.parametrize(("name", "pack"), [("a.gz", gzip.compress), ("a.zst", zstandard.compress)])
def test_of_a_truncated_archive_what_can_be_read_is_kept(tmp_path, name, pack):
    texts = [f"{number} " * 50 for number in range(3000)]
    packed = pack("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    source = source_of(tmp_path, packed[: len(packed) // 2], name, on_bad_document="skip")
    (part,), (found, skipped) = source.parts(), read(source)
    assert 0 < len(found) < len(texts)
    assert found == texts[: len(found)]
    assert skipped.count == 1
    with pytest.raises(UserError, match=rf"{name}: a .*truncated") as refused:
        read(JsonLinesSource(files=source.files), [part])
    assert skipped.first == [str(refused.value)]
