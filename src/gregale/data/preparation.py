"""Preparing a corpus: the token stores that a configuration describes, and the examples made of them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gregale.atomic_files import user_cache
from gregale.data.build import NamedSource, TokenCache, build_store, key_of
from gregale.data.chunk_cache import ChunkCache
from gregale.data.config import AUTO, SOURCES, VALIDATION, DataConfig
from gregale.data.examples import Examples, Windows, held_out_examples, training_examples, validation_examples
from gregale.data.mixtures import ReplicaExamples, replica_examples
from gregale.data.parts import json_sha256
from gregale.data.progress import Report, silent
from gregale.data.sources import SourceConfig
from gregale.data.sources.base import expand
from gregale.data.split import End, cut_of, end_cut, end_of, split_at
from gregale.data.store import MANIFEST_NAME, TokenStore, in_words
from gregale.data.stream import DocumentStream
from gregale.data.tokenizer_training import make_tokenizer, naming
from gregale.data.tokenizers import BpeConfig, Tokenizer
from gregale.errors import UserError
from gregale.storage import storage_path


@dataclass(frozen=True)
class Corpus:
    """Prepared data.

    Attributes:
        train: endless examples, see `training_examples` and, with a mixture for each replica, `replica_examples`.
        held_out: every held-out window once, in order; None if nothing is held out.
        validation: by validation source, every window once, in order.
        tokenizer: of all the tokens.
        train_streams: by source, the tokens to train on.
        held_out_streams: by source, the tokens that are held out.
        validation_streams: by validation source, all of its tokens.
        stores: every token store, by the key of its source (`sources.books`, `validation.news`).
        fingerprint: a hash of the tokens, the tokenizer and the split; equal on every host of a job that reads the same
            data, and when a job resumes. Validation sources have no part in it.
        notes: lines that the user should see, such as how many documents were skipped.
    """

    train: Examples | ReplicaExamples
    held_out: Examples | None
    validation: dict[str, Examples]
    tokenizer: Tokenizer
    train_streams: dict[str, DocumentStream]
    held_out_streams: dict[str, DocumentStream]
    validation_streams: dict[str, DocumentStream]
    stores: dict[str, TokenStore]
    fingerprint: str
    notes: tuple[str, ...]

    @property
    def training_tokens(self) -> int:
        """Tokens of one epoch of every source."""
        return sum(map(len, self.train_streams.values()))

    @property
    def held_out_tokens(self) -> int:
        return sum(map(len, self.held_out_streams.values()))

    @property
    def validation_fingerprints(self) -> dict[str, str]:
        """By validation source, a hash of its tokens."""
        return {name: json_sha256(self.stores[f"{VALIDATION}.{name}"].content) for name in self.validation}


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
    tokenizer, stores, cuts = build_and_cut(config, sequence_length, report)
    splits = {name: split_at(store, config.held_out, cuts.get(name)) for name, store in stores.items()}
    train = {name: each.train for name, each in splits.items()}
    held_out = {name: each.held_out for name, each in splits.items()}
    windows = {name: training_windows(name, stream, sequence_length, config) for name, stream in train.items()}
    validating, validation = validation_of(config, tokenizer, report)
    checksums = {name: store.content for name, store in stores.items()}
    by_key = {f"{SOURCES}.{name}": store for name, store in stores.items()}
    by_key |= {f"{VALIDATION}.{name}": store for name, store in validating.items()}
    return Corpus(
        train=mixed_examples(windows, config, seed if config.shuffle else None),
        held_out=held_out_examples(held_out, sequence_length, config.cross_documents) if config.held_out else None,
        validation={name: validation_windows(name, each, sequence_length, config) for name, each in validation.items()},
        tokenizer=tokenizer,
        train_streams=train,
        held_out_streams=held_out,
        validation_streams=validation,
        stores=by_key,
        # Cuts are named only if there are any, so that this is what it was for sources whose documents are held out.
        fingerprint=json_sha256([checksums, tokenizer.fingerprint, config.held_out, *([cuts] if cuts else [])]),
        notes=tuple(note for key, store in by_key.items() for note in notes_on(key, store)),
    )


def token_cache(config: DataConfig) -> TokenCache:
    """Return where the token stores lie; raise `UserError` for the URL of what is no store."""
    given = None if config.local_cache == AUTO else expand(config.local_cache, "data.local_cache")
    local = user_cache() / "pieces" if given is None else Path(given)
    return TokenCache(storage_path(expand(config.cache, "data.cache")), ChunkCache(local))


def validation_of(
    config: DataConfig, tokenizer: Tokenizer, report: Report
) -> tuple[dict[str, TokenStore], dict[str, DocumentStream]]:
    """The store of each validation source, and all of its tokens."""
    stores = stores_of(VALIDATION, config, tokenizer, report)
    return stores, {name: split_at(store, 0, None).train for name, store in stores.items()}


def build_and_cut(
    config: DataConfig, sequence_length: int, report: Report
) -> tuple[Tokenizer, dict[str, TokenStore], dict[str, int]]:
    """The tokenizer, the store of each source, and where the held-out end of each source begins that has one.

    Whether a source has an end is known when its tokens are. A BPE was trained on that end by then; it is trained again
    on what lies before, and the end stays where it is in the text.
    """
    tokenizer, stores = build_stores(config, report)
    found = {name: end_cut(store, config.held_out, sequence_length) for name, store in stores.items()}
    cuts = {name: cut for name, cut in found.items() if cut is not None}
    if not cuts or not isinstance(config.tokenizer, BpeConfig):
        return tokenizer, stores, cuts
    ends = {name: end_of(stores[name], cut, tokenizer) for name, cut in cuts.items()}
    tokenizer, stores = build_stores(config, report, ends)
    return tokenizer, stores, {name: cut_of(stores[name], end, tokenizer) for name, end in ends.items()}


def build_stores(
    config: DataConfig, report: Report = silent, ends: Mapping[str, End] = MappingProxyType({})
) -> tuple[Tokenizer, dict[str, TokenStore]]:
    """The tokenizer and the store of each source, built where the cache lacks them.

    Args:
        config: the data.
        report: told how far the building is.
        ends: the held-out ends of sources, which train no tokenizer.

    Raises:
        UserError: a source or the tokenizer is unfit; the message begins with the source's name.
    """
    check_sources(config)
    tokenizer = make_tokenizer(config, token_cache(config).place, ends, report)
    return tokenizer, stores_of(SOURCES, config, tokenizer, report)


def check_sources(config: DataConfig) -> None:
    """Raises `UserError` if there is no source."""
    if not config.sources:
        raise UserError(
            "data.sources: empty; give at least one, for example "
            "sources: {books: {type: text, files: ['books/*.txt']}}. "
            f"The types are: {', '.join(SourceConfig.get_known_choices())}."
        )


def stores_of(group: str, config: DataConfig, tokenizer: Tokenizer, report: Report) -> dict[str, TokenStore]:
    """The store of each of the configuration's `sources`, or of each in `validation`."""
    cache, workers = token_cache(config), config.workers or os.cpu_count() or 1
    stores = {}
    for name, source in getattr(config, group).items():
        with naming(f"data.{group}.{name}"):
            stores[name] = build_store(NamedSource(name, source), tokenizer, cache, workers, report)
    return stores


def training_windows(name: str, stream: DocumentStream, sequence_length: int, config: DataConfig) -> Windows:
    """The windows of one source's training documents; there must be one."""
    windows = Windows([stream], sequence_length, config.cross_documents)
    if len(windows) == 0:
        raise UserError(
            f"data.sources.{name}: too little text to train on. A window takes {sequence_length} + 1 = "
            f"{sequence_length + 1} tokens; this source has {len(stream)} after holding out {config.held_out:g} of it. "
            "Shorten the sequences, give more text, or lower data.held_out."
        )
    return windows


def validation_windows(name: str, stream: DocumentStream, sequence_length: int, config: DataConfig) -> Examples:
    """The windows of one validation source; there must be one."""
    with naming(f"data.{VALIDATION}.{name}"):
        return validation_examples(stream, sequence_length, config.cross_documents)


def mixed_examples(windows: dict[str, Windows], config: DataConfig, seed: int | None) -> Examples | ReplicaExamples:
    """The windows of all sources mixed, for all replicas alike or for each by itself; no seed: in order."""
    if config.replica_mixtures:
        return replica_examples(windows, config.replica_mixtures, seed)
    return training_examples(windows, {name: source.weight for name, source in config.sources.items()}, seed)


def notes_on(key: str, store: TokenStore) -> list[str]:
    """Return the lines of a note if documents of a source were left out, or if its folder of an older version is left.

    - `key`: of the source, `sources.books`
    """
    skipped = store.skipped
    notes = [f"data.{key}:", *(f"  {line}" for line in in_words(skipped))] if skipped.count else []
    older = store.folder.with_name(key_of(1, store.manifest["source"], store.manifest["tokenizer"]))
    if (older / MANIFEST_NAME).is_file():
        notes.append(
            f"data.{key}: {older} is a token store of an older version of Gregale and not used any more: the tokens "
            f"were built again in {store.folder}. Delete it, and {older.name}.parts beside it if there is one."
        )
    return notes
