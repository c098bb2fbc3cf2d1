import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gregale.data.sources import Skipped, TextSource, text
from gregale.errors import UserError
from tests.data.conftest import cut, read


def test_a_document_per_file_or_between_separators_without_byte_order_mark(tmp_path, contents):
    (tmp_path / "a.txt").write_bytes("eins\r\nzwei ü".encode())
    (tmp_path / "b.txt").write_bytes(b"")
    assert contents(TextSource(files=(f"{tmp_path}/*.txt",))) == ["eins\r\nzwei ü", ""]
    path = tmp_path / "c"
    for data, expected in (
        ("ü--two--three".encode(), [("ü", 0), ("two", 4), ("three", 9)]),
        (b"\xef\xbb\xbfone--\xef\xbb\xbftwo", [("one", 3), ("\ufefftwo", 8)]),  # inside a file it is a character
    ):
        path.write_bytes(data)
        found = list(TextSource(files=(str(path),), separator="--").documents())
        assert [(one.content, one.start) for one in found] == expected
    assert contents(TextSource(files=(str(path),))) == ["one--\ufefftwo"]


def test_text_that_is_not_utf8_is_refused_with_its_place_or_skipped_by_itself(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one--caf\xe9--three")
    stops, skips = (TextSource(files=(str(path),), separator="--", on_bad_document=how) for how in ("stop", "skip"))
    with pytest.raises(UserError, match=r"a\.txt, byte 8: 0xe9 is not UTF-8"):
        list(stops.documents())
    found, skipped = read(skips)
    assert (found, skipped.count) == (["one", "three"], 1)
    assert skipped.first[0].startswith(f"{path}, byte 8: 0xe9 is not UTF-8")
    (part,) = skips.parts()
    path.unlink()
    for source in (stops, skips):  # what the system does not read is never skipped
        with pytest.raises(UserError, match=r"a\.txt: cannot be read \(No such file"):
            list(source.read(part, Skipped()))


@given(st.lists(st.sampled_from([b"a", b"<e>", b"<", b"e>", b"\n\n"])), st.lists(st.integers(1, 60)))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_cut_into_parts_gives_every_document_once(tmp_path_factory, pieces, cuts):
    data = b"".join(pieces)
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(data)
    source = TextSource(files=(str(path),), separator="<e>")
    parts = cut(path, len(data), cuts)
    found = [document for part in parts for document in source.read(part, Skipped()) if document.content]
    assert [one.content.encode() for one in found] == [each for each in data.split(b"<e>") if each]
    assert all(data[one.start :].startswith(one.content.encode()) for one in found)


def test_a_separator_that_can_overlap_itself_leaves_a_file_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PART_BYTES", 3)
    (tmp_path / "a.txt").write_text("a\n\n\nb\n\nc")
    counts = {"\n\n": 1, "\n": 3, "<e>": 3, "": 1, "aba": 1, "abc": 3}
    for separator, count in counts.items():
        assert len(TextSource(files=(f"{tmp_path}/a.txt",), separator=separator).parts()) == count
