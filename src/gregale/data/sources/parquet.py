"""Parquet files."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gregale.data.sources.base import BadDocument, Document, FileSource, SourceConfig, SourceRange, in_column
from gregale.data.sources.files import opened, readable
from gregale.errors import UserError, install_hint
from gregale.settings import setting
from gregale.storage import is_url

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
