"""The data part of a configuration, and preparing what it describes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gregale.data.build import NamedSource, build_store, locked
from gregale.data.examples import Examples, Windows, held_out_examples, training_examples
from gregale.data.mixtures import ReplicaExamples, check_mixtures, replica_examples
from gregale.data.progress import Report, silent
from gregale.data.sources import SourceConfig
from gregale.data.sources.base import expand
from gregale.data.store import TokenStore, json_sha256
from gregale.data.stream import DocumentStream, held_out_documents
from gregale.data.tokenizers import (
    SAVED_NAME,
    BpeConfig,
    BytesConfig,
    BytesTokenizer,
    FileConfig,
    Tokenizer,
    TokenizerConfig,
    load_tokenizer,
    save_tokenizer,
    tokenizer_from_file,
    train_bpe,
)
from gregale.errors import UserError


@dataclass(frozen=True)
class DataConfig:
    """Which text to train on, and how it becomes examples."""

    sources: dict[str, SourceConfig] = field(
        default_factory=dict, metadata={"help": "where documents come from, by a name of your choice"}
    )
    tokenizer: TokenizerConfig = field(
        default_factory=BytesConfig, metadata={"help": "what turns text into tokens: bytes, file or bpe"}
    )
    held_out: float = field(default=0.02, metadata={"help": "fraction of the documents kept for evaluation"})
    shuffle: bool = field(default=True, metadata={"help": "random order, anew each epoch"})
    cross_documents: bool = field(default=False, metadata={"help": "let attention and loss cross documents"})
    replica_mixtures: list[dict[str, float]] = field(
        default_factory=list,
        metadata={"help": "for each DiLoCo replica its own weights"},
    )
    cache: str = field(default="cache", metadata={"help": "folder for tokenized text, reused by later runs"})
    workers: int = field(default=0, metadata={"help": "processes that tokenize; 0: one for each core"})

    def __post_init__(self):
        if not 0 < self.held_out < 1:
            raise UserError(
                f"data.held_out: {self.held_out} found; it is a fraction between 0 and 1, for example 0.02."
            )
        if self.workers < 0:
            raise UserError(f"data.workers: {self.workers} found; give a number of processes, or 0 for one each core.")
        check_mixtures(self.replica_mixtures, self.sources)


@dataclass(frozen=True)
class Corpus:
    """Prepared data.

    Attributes:
        train: endless examples, see `training_examples` and, with a mixture for each replica, `replica_examples`.
        held_out: every held-out window once, in order.
        tokenizer: of all the tokens.
        train_streams: by source, the documents to train on.
        held_out_streams: by source, the documents that are held out.
        fingerprint: a hash of the tokens, the tokenizer and the split; equal on every host of a job that reads the same
            data, and when a job resumes.
    """

    train: Examples | ReplicaExamples
    held_out: Examples
    tokenizer: Tokenizer
    train_streams: dict[str, DocumentStream]
    held_out_streams: dict[str, DocumentStream]
    fingerprint: str

    @property
    def training_tokens(self) -> int:
        """Tokens of one epoch of every source."""
        return sum(map(len, self.train_streams.values()))

    @property
    def held_out_tokens(self) -> int:
        return sum(map(len, self.held_out_streams.values()))


def prepare(config: DataConfig, sequence_length: int, seed: int, report: Report = silent) -> Corpus:
    """Builds the token stores that the cache lacks, opens all of them, and lays out the examples.

    Args:
        config: the data.
        sequence_length: L, tokens in an example.
        seed: of the shuffle.
        report: told how far the building is.

    Raises:
        UserError: a source or the tokenizer is unfit, or there is not one window to train or to evaluate on.
    """
    tokenizer, stores = build_stores(config, report)
    train, held_out = {}, {}
    for name, store in stores.items():
        out = held_out_documents(len(store.offsets) - 1, config.held_out)
        train[name], held_out[name] = DocumentStream(store, ~out), DocumentStream(store, out)
    windows = {name: training_windows(name, stream, sequence_length, config) for name, stream in train.items()}
    order = seed if config.shuffle else None
    if config.replica_mixtures:
        examples = replica_examples(windows, config.replica_mixtures, order)
    else:
        weights = {name: source.weight for name, source in config.sources.items()}
        examples = training_examples(windows, weights, order)
    checksums = {name: store.manifest["files"] for name, store in stores.items()}
    return Corpus(
        train=examples,
        held_out=held_out_examples(held_out, sequence_length, config.cross_documents),
        tokenizer=tokenizer,
        train_streams=train,
        held_out_streams=held_out,
        fingerprint=json_sha256([checksums, tokenizer.fingerprint, config.held_out]),
    )


def build_stores(config: DataConfig, report: Report = silent) -> tuple[Tokenizer, dict[str, TokenStore]]:
    """The tokenizer and the store of each source, built where the cache lacks them.

    Raises:
        UserError: a source or the tokenizer is unfit; the message begins with the source's name.
    """
    if not config.sources:
        raise UserError(
            "data.sources: empty; give at least one, for example "
            "sources: {books: {type: text, files: ['books/*.txt']}}. "
            f"The types are: {', '.join(SourceConfig.get_known_choices())}."
        )
    cache = Path(expand(config.cache))
    tokenizer = make_tokenizer(config, cache, report)
    workers = config.workers or os.cpu_count() or 1
    stores = {}
    for name, source in config.sources.items():
        with naming(name):
            stores[name] = build_store(NamedSource(name, source), tokenizer, cache, workers, report)
    return tokenizer, stores


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Puts a source's name before the message of a mistake found in it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data.sources.{name}: {error}") from error


def training_windows(name: str, stream: DocumentStream, sequence_length: int, config: DataConfig) -> Windows:
    """The windows of one source's training documents; there must be one."""
    windows = Windows([stream], sequence_length, config.cross_documents)
    if len(windows) == 0:
        raise UserError(
            f"data.sources.{name}: too little text to train on. A window takes {sequence_length} + 1 = "
            f"{sequence_length + 1} tokens; this source has {len(stream)} after holding out {config.held_out:g} of its "
            "documents. Shorten the sequences, give more text, or lower data.held_out."
        )
    return windows


def make_tokenizer(config: DataConfig, cache: Path, report: Report) -> Tokenizer:
    """The configured tokenizer; a BPE is trained once and kept in the cache."""
    if isinstance(config.tokenizer, FileConfig):
        return tokenizer_from_file(config.tokenizer)
    if not isinstance(config.tokenizer, BpeConfig):
        return BytesTokenizer()
    identities = {}
    for name, source in config.sources.items():
        with naming(name):
            identities[name] = source.identity()
    key = json_sha256([identities, config.tokenizer.vocabulary, config.held_out])[:24]
    folder = cache / f"tokenizer-{key}"
    with locked(folder.with_suffix(".lock")):
        if not (folder / SAVED_NAME).exists():
            texts = training_texts(config, report)
            save_tokenizer(train_bpe(config.tokenizer, texts), folder)
    return load_tokenizer(folder)


def training_texts(config: DataConfig, report: Report) -> Iterator[str]:
    """The text of the documents that are not held out, over all sources.

    A document's number counts those that are not empty, as in the store, so that the split is the store's.
    """
    label = "training the tokenizer"
    parts = [(name, source, part) for name, source in config.sources.items() for part in source.parts()]
    total = sum(part.size_bytes for _, _, part in parts)
    done, found, number, current = 0, 0, 0, None
    for name, source, part in parts:
        with naming(name):
            number = number if name == current else 0
            current = name
            texts = [document.content for document in source.read(part) if len(document.content)]
        out = held_out_documents(number + len(texts), config.held_out)[number:]
        number += len(texts)
        for text, held in zip(texts, out, strict=True):
            if isinstance(text, str) and not held:
                found += 1
                yield text
        done += part.size_bytes
        report(label, done, total)
    if found == 0:
        raise UserError("data.tokenizer: no text to train a BPE on; the sources have no training document of text.")
