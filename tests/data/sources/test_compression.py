"""Compressed files by their first bytes, what stays of damaged ones, and what is no text of UTF-8."""

import bz2
import gzip
import json
import lzma
import os

import pytest
import zstandard

from gregale.data.sources import CsvSource, JsonLinesSource, TextSource, base, text
from gregale.errors import UserError
from tests.data.conftest import read

PACK = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}
TEXTS = [f"document {number} ü" for number in range(3000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@pytest.fixture
def made(tmp_path):
    def make(data: bytes, kind=JsonLinesSource, name="a.txt", **fields):
        (tmp_path / name).write_bytes(data)
        return kind(files=(f"{tmp_path}/{name}",), **fields)

    return make


@pytest.mark.parametrize("pack", PACK.values(), ids=PACK)
def test_compressed_files_are_recognised_by_their_first_bytes_in_every_format(made, contents, monkeypatch, pack):
    monkeypatch.setattr(text, "PART_BYTES", 999)
    monkeypatch.setattr(base, "READ_BYTES", 64)
    for data, source in (
        (LINES, {"kind": JsonLinesSource}),
        ("text\n" + "\n".join(TEXTS), {"kind": CsvSource}),
        ("--".join(TEXTS), {"kind": TextSource, "separator": "--"}),
        ("\n\n".join(TEXTS), {"kind": TextSource, "separator": "\n\n"}),
    ):
        data = data if isinstance(data, bytes) else data.encode()
        for packed in (pack(b"\xef\xbb\xbf" + data), pack(data[:20]) + pack(data[20:]) + b"\0" * 8):
            assert contents(made(packed, **source)) == TEXTS, source
    assert contents(made(pack(b"\xef\xbb\xbfwhole"), TextSource)) == ["whole"]
    assert contents(made(pack(b""), TextSource)) == [""]


@pytest.mark.parametrize("kind", PACK)
def test_of_a_damaged_file_every_document_before_the_damage_is_kept(made, kind):
    """The damage is in a second frame, whose content would decode to others, or in the checksum at the end."""
    whole, second = PACK[kind](LINES), bytearray(PACK[kind](LINES))
    second[24 : len(second) // 2] = bytes(len(second) // 2 - 24)
    cases = [(whole + bytes(second), TEXTS), (whole + second[:24], TEXTS), (b"\0".join((whole, b"no frame")), TEXTS)]
    checksum = {"gzip": 8, "bzip2": 5, "xz": 26, "zstd": 1}[kind]  # its last byte, or that of a part, from the end
    cases.append((whole[:-checksum] + bytes([whole[-checksum] ^ 1]) + whole[len(whole) - checksum + 1 :], TEXTS))
    for data, expected in cases:
        found, skipped = read(made(data, on_bad_document="skip"))
        assert found == expected
        assert skipped.count == 1
        size = f"{len(LINES):,} bytes of its text"
        assert size in skipped.first[0], skipped
        with pytest.raises(UserError, match=rf"a\.txt: a (damaged|truncated) {kind} file.* after {size}"):
            read(made(data))
    assert read(made(whole[: len(whole) // 2], on_bad_document="skip"))[1].count == 1


def test_documents_of_a_damaged_file_count_up_to_the_last_separator(made):
    data = gzip.compress(b"one--two--three")
    data = data[:-6] + b"\0" + data[-5:]
    found, skipped = read(made(data, TextSource, separator="--", on_bad_document="skip"))
    assert (found, skipped.count) == (["one", "two"], 1)
    found, skipped = read(made(data, TextSource, on_bad_document="skip"))
    assert (found, skipped.count) == ([], 1)


def test_a_zstd_window_above_128_mib_is_read_and_one_above_the_limit_is_named(made, contents):
    parameters = zstandard.ZstdCompressionParameters(
        window_log=28, hash_log=10, chain_log=10, strategy=zstandard.STRATEGY_FAST
    )
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = packer.compress(LINES) + packer.flush()
    assert zstandard.get_frame_parameters(data).window_size == 256 << 20
    assert contents(made(data)) == TEXTS
    exponent = 32 - 10  # of a window of 4 GiB
    with pytest.raises(UserError, match=r"a\.txt: its zstd window is above 2 GiB"):
        contents(made(b"\x28\xb5\x2f\xfd\x00" + bytes([exponent << 3]) + b"\x01\0\0"))


def test_the_first_bytes_decide_and_not_the_name(made):
    line = b'{"text": "a"}'
    for name in ("a.gz", "a.jsonl.zst", "a.xz", "a.bz2"):
        assert read(made(line, name=name))[0] == read(made(PACK["xz"](line), name=name))[0] == ["a"]
    for kind, name in (("gzip", "a.gz"), ("zstd", "a.jsonl.zst")):
        for data in (b"\0" * 9, b"x" + PACK[kind](line)[1:]):
            with pytest.raises(
                UserError, match=rf"{name}: a damaged {kind} file, or none: it begins neither as one nor"
            ):
                read(made(data, name=name))


@pytest.mark.parametrize("kind", [TextSource, JsonLinesSource, CsvSource])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_is_named_and_skipped_as_one_document(made, monkeypatch, kind, encoding):
    monkeypatch.setattr(text, "PART_BYTES", 100)
    data = LINES.decode().encode(encoding)
    named = f"a.txt: its text is {encoding[:6].upper()}, not UTF-8. Convert it: iconv -f"
    for content in (data, gzip.compress(data)):
        with pytest.raises(UserError, match=named):
            read(made(content, kind))
        found, skipped = read(made(content, kind, on_bad_document="skip"))
        assert (found, skipped.count) == ([], 1)
        assert named in skipped.first[0]


def test_a_json_array_and_a_pipe_are_named(tmp_path, made):
    for data in (b'[{"text": "a"}]', b'[\n{"text": "a"},\n{"text": "b"}\n]', b' [ {"text": "a"},\n'):
        with pytest.raises(UserError, match=r"line 1: .*It begins a JSON array: `jq -c '\.\[\]' OLD > NEW` writes"):
            read(made(data))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=rf"files: {tmp_path}/pipe is a pipe or a device\. .*cat {tmp_path}/pipe > FIL"):
        TextSource(files=(f"{tmp_path}/pipe",)).parts()


def test_a_field_inside_of_another_is_named_with_a_dot(made, contents):
    data = b'{"a": {"text": "one", "b.c": "two"}, "a.text": "literal"}\n{"a": {"text": "three"}}\n{"a": "x"}\n'
    source = made(data, field="a.text", on_bad_document="skip")
    found, skipped = read(source)
    assert found == ["literal", "three"]
    assert skipped.first[0].endswith("line 3: no field `a.text`; the fields of `a` are: none.")
    with pytest.raises(UserError, match=r"line 1: no field `a\.z`; the fields of `a` are: text, b\.c\."):
        contents(made(data, field="a.z"))
