"""Token files that another program made."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from gregale.data.sources.base import BadDocument, Document, FileSource, SourceConfig, SourceRange, ranges
from gregale.data.sources.files import opened, readable
from gregale.errors import UserError
from gregale.settings import setting, whole
from gregale.storage import is_url, read_range, storage_path

DTYPES = ("uint16", "uint32", "int32")
PART_TOKENS = 4 << 20
READ_TOKENS = 1 << 20  # in one read of an object


@SourceConfig.register_subclass("tokens")
@dataclass(frozen=True)
class TokensSource(FileSource):
    """Token files: .npy, or raw little-endian integers; a document ends after each end-of-document token."""

    dtype: str = setting("uint16", "type of a raw file", choices=DTYPES)
    end_of_document: int | None = setting(
        None, "id that ends a document in these files; null: a document per file", range=whole(0)
    )

    def split(self, path: str, size: int) -> list[SourceRange]:
        tokens = self.open(path)
        if self.end_of_document is None:
            return [SourceRange(path, 0, len(tokens), tokens.nbytes)]
        pieces = ranges(len(tokens), PART_TOKENS)
        return [SourceRange(path, start, stop, (stop - start) * tokens.itemsize) for start, stop in pieces]

    def open(self, path: str) -> "np.ndarray | RemoteArray":
        """Return the ids [token], memory-mapped or, from an object store, read on access."""
        with readable(path), opened(path) as file:
            size = file.seek(0, os.SEEK_END)
            if size == 0:
                raise BadDocument(f"{path}: empty (0 bytes), no tokens.")
            if not path.endswith(".npy"):
                return self.raw(path, size)
            file.seek(0)
            tokens = npy(path, file)
        if len(tokens.shape) != 1 or tokens.dtype.kind not in "iu":
            raise BadDocument(f"{path}: {tokens.dtype} of shape {tokens.shape}; expected integers in one dimension.")
        return tokens

    def raw(self, path: str, size: int) -> "np.ndarray | RemoteArray":
        """Return the ids [token] of a file without a header."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        if size % dtype.itemsize:
            raise BadDocument(
                f"{path}: {size} bytes is no whole number of {self.dtype} tokens ({dtype.itemsize} bytes each)."
            )
        if is_url(path):
            return RemoteArray(path, 0, dtype, (size // dtype.itemsize,))
        return np.memmap(path, dtype=dtype, mode="r")

    def scan(self, part: SourceRange) -> Iterator[Document | BadDocument]:
        tokens = self.open(part.path)
        start = part.start
        if start > 0:  # the first document here begins after the end of the one before
            start = self.end(tokens, start - 1) + 1
        while start < part.stop:
            stop = self.end(tokens, start)
            yield Document(np.asarray(tokens[start:stop]), part.path, start)
            start = stop + 1

    def end(self, tokens: "np.ndarray | RemoteArray", start: int) -> int:
        """Return the index of the first end-of-document token at or after `start`, or the end of the file."""
        if self.end_of_document is None:
            return len(tokens)
        block = 1024
        while start < len(tokens):
            found = np.flatnonzero(tokens[start : start + block] == self.end_of_document)
            if len(found):
                return start + int(found[0])
            start += block
            block *= 2
        return len(tokens)


def npy(path: str, file: BinaryIO) -> "np.ndarray | RemoteArray":
    """Return the array of a .npy file, memory-mapped or read on access."""
    try:
        if not is_url(path):
            return np.load(path, mmap_mode="r", allow_pickle=False)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        return RemoteArray(path, file.tell(), dtype, shape)
    except UserError:
        raise
    except Exception as error:  # for a damaged header Python's parser may raise any exception
        raise BadDocument(f"{path}: not a .npy array, or a damaged one ({error}).") from error


class RemoteArray:
    """An array that begins after `offset` bytes of an object; each read of a slice also fetches the data after it."""

    def __init__(self, path: str, offset: int, dtype: np.dtype, shape: tuple[int, ...]):
        self._path, self._offset, self.dtype, self.shape = path, offset, dtype, shape
        self.itemsize = dtype.itemsize
        self.nbytes = math.prod(shape) * dtype.itemsize
        self._start, self._read = 0, np.empty(0, dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, selected: slice) -> np.ndarray:
        start, stop, _ = selected.indices(len(self))
        if not self._start <= start <= stop <= self._start + len(self._read):
            ends = (each * self.itemsize + self._offset for each in (start, max(stop, start + READ_TOKENS)))
            with readable(self._path):
                data = read_range(storage_path(self._path), *ends)
            self._start, self._read = start, np.frombuffer(data[: self.nbytes], self.dtype)
        return self._read[start - self._start : stop - self._start]
