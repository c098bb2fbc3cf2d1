"""Sources of documents: a `SourceConfig` choice for each file format; importing this package registers all of them."""

# Messages list the types in the order of these imports.
# isort: off
from gregale.data.sources.base import Document, Skipped, SourceConfig, SourceRange
from gregale.data.sources.text import CsvSource, JsonLinesSource, TextSource, TsvSource
from gregale.data.sources.tables import HuggingFaceSource, ParquetSource, TokensSource
from gregale.data.sources.chat import ChatCsvSource, ChatHuggingFaceSource, ChatParquetSource, ChatSource
