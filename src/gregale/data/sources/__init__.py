"""Sources of documents: a `SourceConfig` choice for each file format; importing this package registers all of them."""

from gregale.data.sources.base import Document, Skipped, SourceConfig, SourceRange
from gregale.data.sources.chat import ChatCsvSource, ChatHuggingFaceSource, ChatParquetSource, ChatSource
from gregale.data.sources.tables import HuggingFaceSource, ParquetSource, TokensSource
from gregale.data.sources.text import CsvSource, JsonLinesSource, TextSource, TsvSource
