"""Make the configured tokenizer; train it, if needed, on the text of all sources that is not held out."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gregale.data.build import once, writing
from gregale.data.chat.conversation import Conversation, Pair
from gregale.data.chat.template import built_in, given_template
from gregale.data.config import DataConfig
from gregale.data.examples import End, held_out_documents
from gregale.data.sources import Document, Skipped, SourceConfig
from gregale.data.sources.base import CHANGED, expand
from gregale.data.store import Report, json_sha256
from gregale.data.tokenizers import (
    SAVED_NAME,
    TRAINED_END_OF_DOCUMENT,
    BpeConfig,
    LibraryTokenizer,
    Tokenizer,
    load_tokenizer,
    save_tokenizer,
)
from gregale.errors import UserError
from gregale.storage import StoragePath, storage_path


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Add the key of a source to the message of its error."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}: {error}") from error


def training_texts(
    sources: Mapping[str, SourceConfig], fraction: float, ends: Mapping[str, End], report: Report
) -> Iterator[str]:
    """Yield the text of all sources that is not held out.

    A document's number counts the documents that are not empty, as in the store, so that both use the same split.
    Raises `UserError` if a source cannot be read, or there is no text.

    - `fraction`: the proportion of documents that is held out
    - `ends`: by name, the sources that have a held-out end instead
    - `report`: receives the number of input bytes read
    """
    parts = [(name, source, part) for name, source in sources.items() for part in source.parts()]
    total = sum(part.size_bytes for _, _, part in parts)
    done, found, number, current = 0, 0, 0, None
    for name, source, part in parts:
        with naming(f"data.sources.{name}"):
            number = number if name == current else 0
            current = name
            documents = [document for document in source.read(part, Skipped()) if len(document.content)]
        end = ends.get(name)  # counts a pair as two documents
        end = end and end._replace(document=end.document // source.rows_together)
        for text in kept_of(documents, number, fraction, end):
            found += 1
            yield text
        number += len(documents)
        done += part.size_bytes
        report("training the tokenizer", done, total)
    if found == 0:
        raise UserError("data.tokenizer: no text to train a BPE on; the sources have no training document of text.")


def kept_of(documents: list[Document], first: int, fraction: float, end: End | None) -> Iterator[str]:
    """Yield the texts of documents that are not held out; `first` is the number of the first document."""
    out = held_out_documents(first + len(documents), fraction)[first:]
    for number, (document, held) in enumerate(zip(documents, out, strict=True), first):
        text = document.content.content if isinstance(document.content, Conversation | Pair) else document.content
        if isinstance(text, str) and (text := before(text, number, end) if end else "" if held else text):
            yield text


def before(text: str, number: int, end: End) -> str:
    """Return the text of a document before the held-out end of its source."""
    if number != end.document:
        return text if number < end.document else ""
    data = text.encode("utf-8")  # a conversation's template has added some, so less of it remains than could
    return data[: len(data) - end.size_bytes].decode("utf-8", "ignore")  # the cut may lie within a character


def make_tokenizer(config: DataConfig, cache: StoragePath, ends: Mapping[str, End], report: Report) -> Tokenizer:
    """Return the configured tokenizer, with its chat template if it has one or a source needs one."""
    found = trained_or_built(config, cache, ends, report)
    has_chat = any(each.has_conversations for each in (*config.sources.values(), *config.validation.values()))
    path = None if (given := config.tokenizer.json_path) is None else storage_path(expand(given))
    try:
        found.chat_template = given_template(config.chat_template, path, found.end_name)
    except UserError:
        if has_chat or config.chat_template:
            raise  # text without conversations needs no template, so damaged files beside the tokenizer stop nothing
    if found.chat_template is None and has_chat:
        found.chat_template = built_in(found.control_tokens, found.end_name)
    return found


def trained_or_built(config: DataConfig, cache: StoragePath, ends: Mapping[str, End], report: Report) -> Tokenizer:
    """Return the configured tokenizer; a BPE is trained once, without held-out text, and kept in the cache."""
    bpe = config.tokenizer.trained
    if bpe is None:
        return config.tokenizer.build()

    def identities() -> dict[str, dict]:
        found = {}
        for name, source in config.sources.items():
            with naming(f"data.sources.{name}"):
                found[name] = source.identity()
        return found

    before_training = identities()
    key = json_sha256([before_training, bpe.vocabulary, config.held_out, *([ends] if ends else [])])[:24]
    folder = cache / f"tokenizer-{key}"

    def train() -> None:
        texts = training_texts(config.sources, config.held_out, ends, report)
        trained = train_bpe(bpe, texts)
        if identities() != before_training:
            raise UserError(f"data.sources: a file {CHANGED}")
        save_tokenizer(trained, folder)

    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        once(cache / f"{folder.name}.claim", train, lambda: (folder / SAVED_NAME).is_file())
    return load_tokenizer(folder)


def train_bpe(config: BpeConfig, texts: Iterator[str]) -> Tokenizer:
    """Return a byte-level BPE trained on texts; it has fewer ids than configured if the texts have too few pairs."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary,
        special_tokens=[TRAINED_END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return LibraryTokenizer(library.to_str(), TRAINED_END_OF_DOCUMENT, "the trained tokenizer")
