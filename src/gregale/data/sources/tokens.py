"""Files of tokens that another program has made."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from gregale.data.sources.base import BadDocument, Document, FileSource, Part, SourceConfig, ranges, readable
from gregale.errors import UserError
from gregale.settings import whole

DTYPES = ("uint16", "uint32", "int32")
PART_TOKENS = 4 << 20


@SourceConfig.register_subclass("tokens")
@dataclass(frozen=True)
class TokensSource(FileSource):
    """Token files: .npy, or raw little-endian integers; a document ends after each end-of-document token."""

    dtype: str = field(default="uint16", metadata={"help": "type of a raw file", "choices": DTYPES})
    end_of_document: int | None = field(
        default=None,
        metadata={"help": "id that ends a document in these files; null: a document per file", "range": whole(0)},
    )

    def split(self, path: str) -> list[Part]:
        tokens = self.open(path)
        if self.end_of_document is None:
            return [Part(path, 0, len(tokens), tokens.nbytes)]
        pieces = ranges(len(tokens), PART_TOKENS)
        return [Part(path, start, stop, (stop - start) * tokens.itemsize) for start, stop in pieces]

    def open(self, path: str) -> np.ndarray:
        """The ids [token], memory-mapped."""
        size = os.path.getsize(path)
        if size == 0:
            raise BadDocument(f"{path}: empty (0 bytes), no tokens.")
        if not path.endswith(".npy"):
            itemsize = np.dtype(self.dtype).itemsize
            if size % itemsize:
                raise BadDocument(
                    f"{path}: {size} bytes is no whole number of {self.dtype} tokens ({itemsize} bytes each)."
                )
            with readable(path):
                return np.memmap(path, dtype=np.dtype(self.dtype).newbyteorder("<"), mode="r")
        try:
            with readable(path):
                tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except UserError:
            raise
        except Exception as error:  # a damaged header raises whatever Python's own parser does
            raise BadDocument(f"{path}: not a .npy array, or a damaged one ({error}).") from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise BadDocument(f"{path}: {tokens.dtype} of shape {tokens.shape}; expected integers in one dimension.")
        return tokens

    def scan(self, part: Part) -> Iterator[Document | BadDocument]:
        tokens = self.open(part.path)
        start = part.start
        if start > 0:  # the first document of this part begins after the end of the one that reaches into it
            start = self.end(tokens, start - 1) + 1
        while start < part.stop:
            stop = self.end(tokens, start)
            yield Document(np.asarray(tokens[start:stop]), part.path, start)
            start = stop + 1

    def end(self, tokens: np.ndarray, start: int) -> int:
        """Where the first end-of-document token at or after `start` stands, or the end of the file."""
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
