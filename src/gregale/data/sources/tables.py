"""Sources of tables and arrays: Parquet, data sets of Hugging Face, and tokens."""

import functools
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from gregale.data.sources.base import (
    BadDocument,
    Document,
    FileSource,
    SourceConfig,
    SourceRange,
    expand,
    in_column,
    opened,
    options,
    ranges,
    readable,
)
from gregale.errors import KeyedError, UserError, install_hint
from gregale.settings import setting, whole
from gregale.storage import is_url, read_range, storage_path

BATCH_ROWS = 1024


@dataclass(frozen=True)
class ParquetRows(FileSource):
    """Parquet files, a document per row. Needs the extra `formats` (pyarrow)."""

    def split(self, path: str, size: int) -> list[SourceRange]:
        metadata = open_parquet(path).metadata
        groups = range(metadata.num_row_groups)
        return [SourceRange(path, group, group + 1, metadata.row_group(group).total_byte_size) for group in groups]

    def scan(self, part: SourceRange) -> Iterator[Document | BadDocument]:
        import pyarrow

        file = open_parquet(part.path)
        row = 0
        try:
            columns, values_of = self.reader(file.schema_arrow, part.path)
            row = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[part.start], columns=columns):
                for value in values_of(batch.to_struct_array()):
                    yield self.document(value, part.path, row)
                    row += 1
        except (pyarrow.ArrowException, OSError, UnicodeError) as error:
            raise BadDocument(f"{part.path}, row group {part.start}, near row {row}: damaged ({error}).") from error

    @abstractmethod
    def reader(self, schema, path: str) -> tuple[list[str], Callable[[Any], Iterable]]:
        """Return the columns to read, and a function from an array of rows to an array of the documents' values."""

    @abstractmethod
    def document(self, value, path: str, row: int) -> Document | BadDocument:
        """Return the document of a value, a scalar of pyarrow."""


@SourceConfig.register_subclass("parquet")
@dataclass(frozen=True)
class ParquetSource(ParquetRows):
    """Parquet files, a document per row, its text in one column. Needs the extra `formats` (pyarrow)."""

    column: str = setting("text", "name of the column that holds a document's text; `a.b` is field `b` of struct `a`")

    def reader(self, schema, path: str) -> tuple[list[str], Callable[[Any], Iterable]]:
        import pyarrow.compute

        names = self.names_in(schema, path)
        return [self.column], lambda rows: pyarrow.compute.struct_field(rows, names)  # pyright: ignore -- made at import

    def names_in(self, schema, path: str) -> list[str]:
        """Return the names that lead to the column: its own or, for `a.b`, those of structs and of a field."""
        names = [self.column] if self.column in schema.names else self.column.split(".")
        level = schema
        for name in names:
            found = level.get_all_field_indices(name) if hasattr(level, "get_all_field_indices") else []
            if len(found) != 1:
                how = "several columns" if found else "no column"
                raise UserError(f"{path}: {how} `{self.column}`; the columns are: {', '.join(schema.names)}.")
            level = level.field(found[0]).type
        return names

    def document(self, value, path: str, row: int) -> Document | BadDocument:
        try:
            return in_column(value.as_py(), self.column, path, row)
        except UnicodeDecodeError:
            return BadDocument(f"{path}, row {row}: column `{self.column}` is not UTF-8.")


def open_parquet(path: str):
    """Return a `pyarrow.parquet.ParquetFile`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: Parquet files need the extra `formats`. {install_hint('formats')}") from error
    try:
        with readable(path):
            if not is_url(path):
                opened(path).close()  # it refuses a pipe, for which pyarrow would wait
            return pyarrow.parquet.ParquetFile(opened(path) if is_url(path) else path)
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise BadDocument(f"{path}: not a Parquet file, or a damaged one ({error}).") from error


PART_ROWS = 4096


@dataclass(frozen=True)
class HuggingFaceRows(SourceConfig):
    """A data set of the `datasets` library, by name or as a saved folder. Needs the extra `hf`."""

    path: str = setting("", "name of the data set, or folder written by its save_to_disk")
    name: str | None = setting(None, "configuration of the data set, where it has several")
    split: str = setting("train", "split to read")
    revision: str | None = setting(None, "version of the data set; none: the newest")

    def __post_init__(self):
        super().__post_init__()
        if not self.path:
            raise KeyedError(
                "path", "is empty", "; give the name of a data set, or a folder written by its save_to_disk."
            )

    def parts(self) -> list[SourceRange]:
        rows = self.rows()
        bytes_per_row = rows.data.nbytes / max(1, len(rows))
        pieces = ranges(len(rows), PART_ROWS)
        return [SourceRange(self.path, start, stop, round((stop - start) * bytes_per_row)) for start, stop in pieces]

    def scan(self, part: SourceRange) -> Iterator[Document | BadDocument]:
        rows = self.rows()
        self.check_columns(rows.column_names)
        for row in range(part.start, part.stop):
            try:
                value = rows[row]
            except Exception as error:  # the library's decoders may raise any exception
                yield BadDocument(f"{self.path}, row {row}: cannot be read ({error}).")
            else:
                yield self.document(value, self.path, row)

    def check_columns(self, names: list[str]) -> None:
        """Raise `UserError` if a column is missing."""

    @abstractmethod
    def document(self, value: dict[str, Any], path: str, row: int) -> Document | BadDocument:
        """Return the document of a row."""

    def identity(self) -> dict:
        return {"type": self.get_choice_name(type(self)), "content": self.rows()._fingerprint, **options(self)}

    def rows(self):
        """Return the `datasets.Dataset`, memory-mapped by that library."""
        return load_rows(expand(self.path, "path"), self.name, self.split, self.revision)


@SourceConfig.register_subclass("huggingface")
@dataclass(frozen=True)
class HuggingFaceSource(HuggingFaceRows):
    """A data set of the `datasets` library, by name or as a saved folder. Needs the extra `hf`."""

    column: str = setting("text", "name of the column that holds a document's text")

    def check_columns(self, names: list[str]) -> None:
        if self.column not in names:
            raise UserError(f"{self.path}: no column `{self.column}`; the columns are: {', '.join(names)}.")

    def document(self, value: dict[str, Any], path: str, row: int) -> Document | BadDocument:
        return in_column(value[self.column], self.column, path, row)


@functools.lru_cache(maxsize=8)  # a worker process calls this for each task
def load_rows(path: str, name: str | None, split: str, revision: str | None):
    try:
        import datasets  # pyright: ignore[reportMissingImports] -- an optional extra
    except ImportError as error:
        raise UserError(f"{path}: Hugging Face data sets need the extra `hf`. {install_hint('hf')}") from error
    try:
        if not os.path.isdir(path):
            return datasets.load_dataset(path, name, split=split, revision=revision)
        saved = datasets.load_from_disk(path)
        if not isinstance(saved, datasets.DatasetDict):
            return saved
        if split in saved:
            return saved[split]
    except Exception as error:  # no narrower class covers all errors of the library and the host
        raise UserError(f"{path}: the data set could not be loaded ({error}).") from error
    raise UserError(f"{path}: no split `{split}`; the splits are: {', '.join(map(str, saved))}.")


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
