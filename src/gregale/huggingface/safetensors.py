"""Files of weights as safetensors, plain or in MXFP4.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, byte range) and the
contiguous tensors. It contains no code.

A folder has NAME [experts, inputs, outputs] as NAME_blocks [experts, outputs, inputs / 32, 16] and NAME_scales
[experts, outputs, inputs / 32]. A byte of a block has two inputs of 4 bits, the low ones first: a sign, two bits of an
exponent, one of a mantissa. The scale is 2^(byte - 127), and NaN for 255. bfloat16 holds each value exactly.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
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
BLOCKS, SCALES, BYTES = "_blocks", "_scales", "U8"  # of tensors in MXFP4, see `gregale.huggingface.safetensors`
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


SIZE = 32  # values of a block
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*POSITIVE, *(-value for value in POSITIVE)], np.float32)
FACTORS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))  # of a block, by its scale


@dataclass(frozen=True)
class Packed(Tensor):
    """A tensor in MXFP4; its dtype and shape are those of its decoded values."""

    blocks: Tensor
    scales: Tensor

    def decoded(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each expert and its values, bfloat16 [inputs, outputs]."""
        for expert, of_expert in enumerate(zip(self.blocks.mapped(), self.scales.mapped(), strict=True)):
            yield expert, decoded(*map(np.asarray, of_expert)).T


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values of blocks, bfloat16: [..., blocks, 16] and [..., blocks] -> [..., blocks * 32]."""
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, SIZE)
    with np.errstate(over="ignore"):
        found = VALUES[halves] * FACTORS[scales][..., None]
    return found.astype(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a folder's tensors with one `Packed` in place of each pair of blocks and scales."""
    found = dict(tensors)
    for name in [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]:
        if name + SCALES not in found:
            continue  # the caller names what the folder lacks
        blocks, scales = found.pop(name + BLOCKS), found.pop(name + SCALES)
        if len(blocks.shape) != 4 or blocks.shape[-1] != SIZE // 2 or scales.shape != blocks.shape[:-1]:
            raise UserError(
                f"{blocks.path}: {blocks.name} has the shape {list(blocks.shape)} and {scales.name} "
                f"{list(scales.shape)}; in MXFP4 they are [experts, outputs, n, {SIZE // 2}] and [experts, outputs, n]."
            )
        experts, outputs, count, _ = blocks.shape
        shape, dtype = (experts, count * SIZE, outputs), np.dtype(ml_dtypes.bfloat16)
        found[name] = Packed(blocks.path, name, dtype, shape, blocks.begin, blocks, scales)
    return found
