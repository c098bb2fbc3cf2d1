"""Parquet files."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gregale.data.sources.base import Document, FileSource, Part, SourceConfig, encodable
from gregale.errors import UserError

BATCH_ROWS = 1024


@SourceConfig.register_subclass("parquet")
@dataclass(frozen=True)
class ParquetSource(FileSource):
    """Parquet files, a document per row, its text in one column. Needs the extra `formats` (pyarrow)."""

    column: str = field(default="text", metadata={"help": "name of the column that holds a document's text"})

    def split(self, path: str) -> list[Part]:
        metadata = open_parquet(path).metadata
        groups = range(metadata.num_row_groups)
        return [Part(path, group, group + 1, metadata.row_group(group).total_byte_size) for group in groups]

    def read(self, part: Part) -> Iterator[Document]:
        file = open_parquet(part.path)
        names = file.schema_arrow.names
        if self.column not in names:
            raise UserError(f"{part.path}: no column `{self.column}`; the columns are: {', '.join(names)}.")
        row = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
        try:
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[part.start], columns=[self.column]):
                for value in batch.column(0).to_pylist():
                    place = f"{part.path}, row {row}"
                    if not isinstance(value, str):
                        kind = "empty (null)" if value is None else type(value).__name__
                        raise UserError(f"{place}: column `{self.column}` is {kind}, expected text.")
                    yield Document(encodable(value, place), part.path, row)
                    row += 1
        except UnicodeDecodeError as error:
            raise UserError(
                f"{part.path}, within {BATCH_ROWS} rows after row {row}: text that is not UTF-8."
            ) from error
        except OSError as error:
            raise UserError(f"{part.path}, row group {part.start}, near row {row}: damaged ({error}).") from error


def open_parquet(path: str):
    """A `pyarrow.parquet.ParquetFile`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: Parquet files need the extra `formats`: pip install 'gregale[formats]'.") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a Parquet file, or a damaged one ({error}).") from error
