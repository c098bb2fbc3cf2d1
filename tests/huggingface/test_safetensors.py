"""Headers of safetensors that are damaged, or made to do harm, are refused in one line and without reading more."""

import json
import struct
from pathlib import Path

import pytest

from gregale.errors import UserError
from gregale.huggingface.safetensors import read_header


def file_with(path: Path, header: bytes, data: int = 8) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * data)
    return path


def entry(begin: object, end: object, *shape: object) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry(0, 4, 1), "b": entry(0, 8, 2)}, "b begins at byte .*, and the one before it ends at"),
        ({"a": entry(0, 2**43, 2**41)}, r"is cut off: by its header it has 8,796,093,0\d\d,\d+ bytes"),
        ({"a": entry(0, 8, -1, -2)}, "the shape and the offsets of a are not all whole numbers from 0"),
        ({"a": entry(0, "8", 2)}, "are not all whole numbers"),
        ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, "the header of a safetensors file is JSON"),
        ("[" * 100_000, "the header of a safetensors file is JSON"),
        (json.dumps({"a": entry(0, 4, 1), "b": entry(4, 8, 1)}).replace("b", "a", 1), "a begins at byte"),
        (json.dumps({"a": entry(0, 8, 2)}).replace("[2]", f"[{'9' * 5000}]"), r"is JSON in UTF-8.* It is not\."),
        (json.dumps({"a": entry(0, 8, 2)}).encode("utf-16"), "is JSON in UTF-8"),
        (json.dumps({"a": entry(0, 8, 2)}).encode("utf-8-sig"), "is JSON in UTF-8"),
        (" " + json.dumps({"a": entry(0, 8, 2)}), "is JSON in UTF-8"),
        ({"__metadata__": {"format": {"name": "pt"}}, "a": entry(0, 8, 2)}, "with texts in __metadata__"),
        ({"__metadata__": {"version": 1}, "a": entry(0, 8, 2)}, "with texts in __metadata__"),
        ({"__metadata__": ["pt"], "a": entry(0, 8, 2)}, "with texts in __metadata__"),
        ({"a": entry(0, 8, True, 2)}, "are not all whole numbers"),
    ],
    ids=range(15),
)
def test_a_header_that_is_no_table_of_tensors_is_refused(tmp_path, header, words):
    text = json.dumps(header) if isinstance(header, dict) else header
    with pytest.raises(UserError, match=words):
        read_header(file_with(tmp_path / "model.safetensors", text if isinstance(text, bytes) else text.encode()))


def test_a_length_of_terabytes_is_refused_unread(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**43) + b"{}")
    with pytest.raises(UserError, match="no safetensors file, or cut off: its 10 bytes do not hold its header"):
        read_header(path)
