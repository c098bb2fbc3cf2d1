import gzip
import json
import sys
from itertools import pairwise

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gregale.data.sources import JsonLinesSource, Skipped, SourceRange
from gregale.data.sources import text as jsonl
from gregale.errors import UserError

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
    edges = [0, *sorted({cut for cut in cuts if cut < len(data)}), len(data)]
    parts = [SourceRange(str(path), a, b, b - a) for a, b in pairwise(edges)]
    found = [document for part in parts for document in source.read(part, Skipped())]
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


@pytest.mark.parametrize("name", ["a.gz", "a.zst"])
def test_damaged_and_truncated_archives_are_refused(tmp_path, name):
    texts = "".join(json.dumps({"text": str(number)}) + "\n" for number in range(1000)).encode()
    data = gzip.compress(texts) if name == "a.gz" else zstandard.compress(texts)
    for broken, message in ((data[: len(data) // 2], "truncated"), (b"\0 no archive", "damaged")):
        with pytest.raises(UserError, match=rf"{name}: a .*{message}"):
            list(source_of(tmp_path, broken, name).documents())


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
    source, skipped = JsonLinesSource(files=(str(path),), on_bad_document="skip"), Skipped()
    found = [document for part in source.parts() for document in source.read(part, skipped)]
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
def test_archives_are_read_by_blocks_and_of_a_damaged_one_what_can_be_read_is_kept(
    tmp_path, contents, monkeypatch, name, pack
):
    monkeypatch.setattr(jsonl, "READ_BYTES", 1000)
    texts = [f"{number} " * 50 for number in range(3000)]
    packed = pack("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    assert contents(source_of(tmp_path, packed, name)) == texts
    source, skipped = source_of(tmp_path, packed[: len(packed) // 2], name, on_bad_document="skip"), Skipped()
    (part,) = source.parts()
    found = [document.content for document in source.read(part, skipped)]
    assert 0 < len(found) < len(texts)
    assert found == texts[: len(found)]
    assert skipped.count == 1
    assert "truncated" in skipped.first[0]
