"""Hugging Face data sets."""

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass

from gregale.data.sources.base import (
    BadDocument,
    Document,
    SourceConfig,
    SourceRange,
    expand,
    in_column,
    options,
    ranges,
)
from gregale.errors import KeyedError, UserError, install_hint
from gregale.settings import setting

PART_ROWS = 4096


@SourceConfig.register_subclass("huggingface")
@dataclass(frozen=True)
class HuggingFaceSource(SourceConfig):
    """A data set of the `datasets` library, by name or as a saved folder. Needs the extra `hf`."""

    path: str = setting("", "name of the data set, or folder written by its save_to_disk")
    name: str | None = setting(None, "configuration of the data set, where it has several")
    split: str = setting("train", "split to read")
    column: str = setting("text", "name of the column that holds a document's text")
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
        if self.column not in rows.column_names:
            raise UserError(f"{self.path}: no column `{self.column}`; the columns are: {', '.join(rows.column_names)}.")
        for row in range(part.start, part.stop):
            try:
                value = rows[row][self.column]
            except Exception as error:  # the library's decoders may raise any exception
                yield BadDocument(f"{self.path}, row {row}: cannot be read ({error}).")
            else:
                yield in_column(value, self.column, self.path, row)

    def identity(self) -> dict:
        return {"type": "huggingface", "content": self.rows()._fingerprint, **options(self)}

    def rows(self):
        """Return the `datasets.Dataset`, memory-mapped by that library."""
        return load_rows(expand(self.path, "path"), self.name, self.split, self.revision)


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
