"""Sources of documents: a `SourceConfig` choice for each file format; importing this package registers all of them."""

from gregale.data.sources.base import Document, Skipped, SourceConfig, SourceRange
from gregale.data.sources.chat import ChatCsvSource, ChatHuggingFaceSource, ChatParquetSource, ChatSource
from gregale.data.sources.csv import CsvSource, TsvSource
from gregale.data.sources.huggingface import HuggingFaceSource
from gregale.data.sources.jsonl import JsonLinesSource
from gregale.data.sources.parquet import ParquetSource
from gregale.data.sources.text import TextSource
from gregale.data.sources.tokens import TokensSource
