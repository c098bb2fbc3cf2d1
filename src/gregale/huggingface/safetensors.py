"""Files of tensors in the safetensors format, read and written by ranges.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, place) and the
tensors, one behind the other. Nothing in it is code.
"""

from __future__ import annotations

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
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH = struct.Struct("<Q")
LONGEST_HEADER = 100_000_000  # bytes, as the format says
METADATA = "__metadata__"


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file: what it is, and where it begins, in bytes."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        """Where it ends, in bytes."""
        return self.begin + prod(self.shape) * self.dtype.itemsize

    def mapped(self, writable: bool = False) -> np.ndarray:
        """Its values, read from the file where they are used; `writable`: and written to it where they are set."""
        return np.memmap(self.path, self.dtype, "r+" if writable else "r", self.begin, self.shape)


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name; their values are not read.

    Raises `UserError` if the file is cut off or damaged, if its tensors do not fill it one behind the other, or if it
    has numbers that are no floats.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(LENGTH.size)
        length = LENGTH.unpack(start)[0] if len(start) == LENGTH.size else LONGEST_HEADER + 1
        if length > min(LONGEST_HEADER, size - LENGTH.size):
            raise UserError(f"{path} is no safetensors file, or cut off: its {size:,} bytes do not hold its header.")
        try:
            header = json.loads(file.read(length))
            header.pop(METADATA, None)
            found = {name: _tensor(path, name, entry, LENGTH.size + length) for name, entry in header.items()}
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{path} is damaged: the header of a safetensors file is JSON, and this is not.") from None
    end = LENGTH.size + length
    for tensor in sorted(found.values(), key=lambda each: (each.begin, each.end)):
        if tensor.begin != end:  # two share bytes, or bytes belong to none, as with a name that is there twice
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
    if entry["dtype"] not in DTYPES:
        raise UserError(
            f"{path}: {name} is of dtype {entry['dtype']}; Gregale reads {', '.join(DTYPES)}. A quantised model has to "
            "be made whole by the tool that quantised it."
        )
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise UserError(f"{path} is damaged: the shape and the place of {name} are not all whole numbers from 0.")
    if end - begin != prod(shape) * dtype.itemsize:
        raise UserError(
            f"{path} is damaged: {name} of shape {list(shape)} and dtype {entry['dtype']} takes "
            f"{prod(shape) * dtype.itemsize:,} bytes, and its header gives it {end - begin:,}."
        )
    return Tensor(path, name, dtype, shape, data + begin)


@dataclass(frozen=True)
class Plan:
    """A file that is to be written: its beginning, and where its tensors go."""

    path: Path
    header: bytes
    tensors: Mapping[str, Tensor]

    def make(self) -> None:
        """Makes the file, of its full size, which the disk has to have: tensors are written where they lie."""
        with open(self.path, "wb") as file:
            file.write(self.header)
            file.flush()
            try:
                os.posix_fallocate(file.fileno(), 0, max(tensor.end for tensor in self.tensors.values()))
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from None


def plan_file(path: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype]) -> Plan:
    """A file with tensors in the order of their shapes; nothing is written."""
    header: dict[str, dict] = {METADATA: {"format": "pt"}}
    place = 0
    for name, shape in shapes.items():
        end = place + prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": NAMES[dtypes[name]], "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of 8
    begin = LENGTH.size + len(text)
    tensors = {
        name: Tensor(path, name, dtypes[name], tuple(shape), begin + header[name]["data_offsets"][0])
        for name, shape in shapes.items()
    }
    return Plan(path, LENGTH.pack(len(text)) + text, tensors)


def blocks(array: np.ndarray, values: int = 1 << 22) -> Iterable[np.ndarray]:
    """A tensor's values in pieces."""
    flat = array.reshape(-1)
    return (flat[start : start + values] for start in range(0, flat.size, values))
