from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gregale.data.sources import Skipped, SourceRange, TextSource, text
from gregale.errors import UserError


def test_a_document_per_file(tmp_path, contents):
    (tmp_path / "a.txt").write_bytes("eins\r\nzwei ü".encode())
    (tmp_path / "b.txt").write_bytes(b"")
    assert contents(TextSource(files=(f"{tmp_path}/*.txt",))) == ["eins\r\nzwei ü", ""]


def test_a_separator_cuts_a_file_into_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("ü--two--three")
    found = list(TextSource(files=(str(path),), separator="--").documents())
    assert [document.content for document in found] == ["ü", "two", "three"]
    data = path.read_bytes()
    assert all(data[one.start :].startswith(one.content.encode()) for one in found)


def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(UserError, match=r"latin\.txt, byte 3: 0xe9 is not UTF-8"):
        list(TextSource(files=(str(path),)).documents())


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    source = TextSource(files=(str(tmp_path / "gone.txt"),))
    (tmp_path / "gone.txt").write_text("x")
    (part,) = source.parts()
    (tmp_path / "gone.txt").unlink()
    with pytest.raises(UserError, match=r"gone\.txt: cannot be read \(No such file"):
        list(source.read(part, Skipped()))


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone--\xef\xbb\xbftwo")
    found = list(TextSource(files=(str(path),), separator="--").documents())
    assert [(one.content, one.start) for one in found] == [("one", 3), ("\ufefftwo", 8)], (
        "inside a file it is a character"
    )
    assert [one.content for one in TextSource(files=(str(path),)).documents()] == ["one--\ufefftwo"]


def test_a_piece_that_is_not_utf8_is_skipped_by_itself(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one--caf\xe9--three")
    source, skipped = TextSource(files=(str(path),), separator="--", on_bad_document="skip"), Skipped()
    assert [one.content for part in source.parts() for one in source.read(part, skipped)] == ["one", "three"]
    assert skipped.count == 1
    assert skipped.first[0].startswith(f"{path}, byte 8: 0xe9 is not UTF-8")


def test_what_the_system_will_not_read_is_never_skipped(tmp_path):
    source = TextSource(files=(str(tmp_path / "gone.txt"),), on_bad_document="skip")
    (tmp_path / "gone.txt").write_text("x")
    (part,) = source.parts()
    (tmp_path / "gone.txt").unlink()
    with pytest.raises(UserError, match=r"gone\.txt: cannot be read"):
        list(source.read(part, Skipped()))


@given(st.lists(st.sampled_from([b"a", b"<e>", b"<", b"e>", b"\n\n"])), st.lists(st.integers(1, 60)))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_cut_into_parts_gives_every_document_once(tmp_path_factory, pieces, cuts):
    data = b"".join(pieces)
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(data)
    source = TextSource(files=(str(path),), separator="<e>")
    edges = [0, *sorted({cut for cut in cuts if cut < len(data)}), len(data)]
    parts = [SourceRange(str(path), a, b, b - a) for a, b in pairwise(edges)]
    found = [document for part in parts for document in source.read(part, Skipped()) if document.content]
    assert [one.content.encode() for one in found] == [each for each in data.split(b"<e>") if each]
    assert all(data[one.start :].startswith(one.content.encode()) for one in found)


def test_a_separator_that_can_overlap_itself_leaves_a_file_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PART_BYTES", 3)
    (tmp_path / "a.txt").write_text("a\n\n\nb\n\nc")
    counts = {"\n\n": 1, "\n": 3, "<e>": 3, "": 1, "aba": 1, "abc": 3}
    for separator, count in counts.items():
        assert len(TextSource(files=(f"{tmp_path}/a.txt",), separator=separator).parts()) == count
