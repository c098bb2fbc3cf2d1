"""Hugging Face data sets."""

import functools
import os
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
