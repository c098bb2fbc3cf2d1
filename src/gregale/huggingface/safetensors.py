"""Provides files of tensors in the safetensors format, read and written by byte ranges.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, byte range) and the
contiguous tensors. It contains no code.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from gregale.errors import UserError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
BLOCKS, SCALES, BYTES = "_blocks", "_scales", "U8"  # of tensors in MXFP4, see `gregale.huggingface.mxfp4`
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH = struct.Struct("<Q")
MAX_HEADER = 100_000_000  # bytes, by the format
METADATA = "__metadata__"


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file; `begin`: its first byte."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        """Return the byte after the last one."""
        return self.begin + prod(self.shape) * self.dtype.itemsize

    def mapped(self, writable: bool = False) -> np.ndarray:
        """Return its values as a memory map of the file; `writable`: assignments write to the file."""
        return np.memmap(self.path, self.dtype, "r+" if writable else "r", self.begin, self.shape)


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, by name, without their values.

    Raises `UserError` if the file is truncated or damaged, if its tensors have gaps or overlaps, or if their dtype is
    not a float.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(LENGTH.size)
        length = LENGTH.unpack(start)[0] if len(start) == LENGTH.size else MAX_HEADER + 1
        if length > min(MAX_HEADER, size - LENGTH.size):
            raise UserError(f"{path} is no safetensors file, or cut off: its {size:,} bytes do not hold its header.")
        try:
            content = file.read(length)
            header = json.loads(content.decode("utf-8"))
            if content[:1] != b"{" or {type(text) for text in header.pop(METADATA, {}).values()} - {str}:
                raise ValueError
            found = {name: _tensor(path, name, entry, LENGTH.size + length) for name, entry in header.items()}
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            text = f"JSON in UTF-8, with texts in {METADATA}"
            raise UserError(f"{path} is damaged: the header of a safetensors file is {text}. It is not.") from None
    end = LENGTH.size + length
    for tensor in sorted(found.values(), key=lambda each: (each.begin, each.end)):
        if tensor.begin != end:  # an overlap or a gap, as with a duplicate name
            raise UserError(
                f"{path} is damaged: {tensor.name} begins at byte {tensor.begin:,}, and the one before it ends at "
                f"{end:,}."
            )
        end = tensor.end
    if end != size:
        state = "cut off" if size < end else "damaged"
        raise UserError(f"{path} is {state}: by its header it has {end:,} bytes, and there are {size:,}.")
    return found


def _tensor(path: Path, name: str, entry: dict, data: int) -> Tensor:
    dtypes = DTYPES | ({BYTES: np.dtype(np.uint8)} if name.endswith((BLOCKS, SCALES)) else {})
    if entry["dtype"] not in dtypes:
        raise UserError(
            f"{path}: {name} is of dtype {entry['dtype']}; Gregale reads {', '.join(DTYPES)}. A quantised model has to "
            "be made whole by the tool that quantised it."
        )
    dtype, shape = dtypes[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise UserError(f"{path} is damaged: the shape and the offsets of {name} are not all whole numbers from 0.")
    if end - begin != prod(shape) * dtype.itemsize:
        raise UserError(
            f"{path} is damaged: {name} of shape {list(shape)} and dtype {entry['dtype']} takes "
            f"{prod(shape) * dtype.itemsize:,} bytes, and its header gives it {end - begin:,}."
        )
    return Tensor(path, name, dtype, shape, data + begin)


@dataclass(frozen=True)
class Plan:
    """A file to write: its header, and the byte ranges of its tensors."""

    path: Path
    header: bytes
    tensors: Mapping[str, Tensor]

    def make(self) -> None:
        """Make the file in its full size, because processes write tensors directly to their byte ranges."""
        with open(self.path, "wb") as file:
            file.write(self.header)
            file.flush()
            try:
                os.posix_fallocate(file.fileno(), 0, max(tensor.end for tensor in self.tensors.values()))
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from None


def plan_file(path: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype]) -> Plan:
    """Return the plan of a file with tensors in the order of `shapes`, without a write."""
    header: dict[str, dict] = {METADATA: {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": NAMES[dtypes[name]], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of 8
    begin = LENGTH.size + len(text)
    tensors = {
        name: Tensor(path, name, dtypes[name], tuple(shape), begin + header[name]["data_offsets"][0])
        for name, shape in shapes.items()
    }
    return Plan(path, LENGTH.pack(len(text)) + text, tensors)


def blocks(array: np.ndarray, values: int = 1 << 22) -> Iterable[np.ndarray]:
    """Return a tensor's values in blocks of at most `values`."""
    flat = array.reshape(-1)
    return (flat[start : start + values] for start in range(0, flat.size, values))
