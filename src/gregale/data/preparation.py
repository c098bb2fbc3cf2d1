"""Prepare a corpus: the token stores of a configuration, and the examples made from them."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gregale.atomic_files import user_cache
from gregale.data.build import NamedSource, TokenCache, build_store
from gregale.data.config import AUTO, SOURCES, VALIDATION, DataConfig
from gregale.data.examples import (
    DocumentStream,
    End,
    Examples,
    Rows,
    cut_of,
    end_cut,
    end_of,
    held_out_examples,
    rows_of,
    split_at,
    training_examples,
    validation_examples,
)
from gregale.data.mixtures import MixtureHistory, ReplicaExamples, replica_examples, sources_of, staged_examples
from gregale.data.sources import SourceConfig
from gregale.data.sources.base import expand
from gregale.data.store import ChunkCache, Report, TokenStore, format_skipped, json_sha256, silent
from gregale.data.tokenizer_training import make_tokenizer, naming
from gregale.data.tokenizers import Tokenizer, taken_as_text
from gregale.errors import UserError
from gregale.storage import storage_path


@dataclass(frozen=True)
class Corpus:
    """Prepared data."""

    train: Examples | ReplicaExamples  # endless, see `training_examples` and `replica_examples`
    held_out: Examples | None  # every held-out row once, in order; None if nothing is held out
    validation: dict[str, Examples]  # by validation source, every row once, in order
    tokenizer: Tokenizer
    train_rows: dict[str, Rows]  # by source, the rows of one epoch
    train_streams: dict[str, DocumentStream]  # by source, the training tokens
    held_out_streams: dict[str, DocumentStream]  # by source, the held-out tokens
    validation_streams: dict[str, DocumentStream]  # by validation source, all of its tokens
    stores: dict[str, TokenStore]  # by the key of its source: `sources.books`, `validation.news`
    cuts: dict[str, int]  # by source with a held-out end, the index at which that end begins
    held_out_share: float
    seed: int | None  # of the order of examples; None: they are in order
    notes: tuple[str, ...]  # lines for the user, such as the number of skipped documents

    @property
    def fingerprint(self) -> str:
        return self.fingerprint_of(self.train_rows)

    def fingerprint_of(self, sources: Iterable[str]) -> str:
        """Return a hash of the tokens of some sources, the tokenizer and the split, without validation sources.

        It is equal on all hosts that read the same data, and when a job resumes.
        """
        checksums = {name: self.stores[f"{SOURCES}.{name}"].content for name in sources}
        cuts = {name: cut for name, cut in self.cuts.items() if name in checksums}
        # Include cuts only if there are any: the fingerprint of a source with held-out documents must not change.
        return json_sha256([checksums, self.tokenizer.fingerprint, self.held_out_share, *([cuts] if cuts else [])])

    def fingerprint_after(self, mixtures: MixtureHistory) -> str:
        """Return the fingerprint of a run with these mixtures: that of the sources from which it draws."""
        return self.fingerprint_of(sources_of(mixtures))

    def training(self, mixtures: MixtureHistory) -> Examples | ReplicaExamples:
        """Return the training examples of a run with these mixtures."""
        return self.train if len(mixtures) < 2 else staged_examples(self.train_rows, mixtures, self.seed)

    @property
    def training_tokens(self) -> int:
        """Return the number of tokens in one epoch of every source."""
        return sum(map(len, self.train_streams.values()))

    @property
    def held_out_tokens(self) -> int:
        return sum(map(len, self.held_out_streams.values()))

    @property
    def validation_fingerprints(self) -> dict[str, str]:
        """Return, by validation source, a hash of its tokens."""
        return {name: json_sha256(self.stores[f"{VALIDATION}.{name}"].content) for name in self.validation}


def prepare(config: DataConfig, sequence_length: int, seed: int, report: Report = silent) -> Corpus:
    """Build the token stores that the cache lacks, open all stores, and arrange the examples.

    Raises `UserError` if a source or the tokenizer is invalid, or there is no window to train or to evaluate on.
    """
    cache = token_cache(config)
    tokenizer, stores, cuts = build_and_cut(config, cache, sequence_length, report)
    together = {name: source.rows_together for name, source in config.sources.items()}
    splits = {name: split_at(store, config.held_out, cuts.get(name), together[name]) for name, store in stores.items()}
    train = {name: each.train for name, each in splits.items()}
    held_out = {name: each.held_out for name, each in splits.items()}
    rows = source_rows(SOURCES, train, sequence_length, config, evaluates=False)
    check_rows(rows, config.held_out)
    held_out_rows = source_rows(SOURCES, held_out, sequence_length, config)
    check_loss(f"data.{SOURCES}", rows)
    validating = stores_of(VALIDATION, config, cache, tokenizer, report)
    validation = {name: split_at(store, 0, None).train for name, store in validating.items()}
    validation_rows = source_rows(VALIDATION, validation, sequence_length, config)
    check_loss(f"data.{VALIDATION}", validation_rows)
    validation_sets = {}
    for name, each in validation_rows.items():
        with naming(f"data.{VALIDATION}.{name}"):
            validation_sets[name] = validation_examples(each)
    shuffle = seed if config.shuffle else None
    by_key = {f"{SOURCES}.{name}": store for name, store in stores.items()}
    by_key |= {f"{VALIDATION}.{name}": store for name, store in validating.items()}
    return Corpus(
        train=(
            replica_examples(rows, config.replica_mixtures, shuffle)
            if config.replica_mixtures
            else training_examples(rows, config.weights, shuffle)
        ),
        held_out=held_out_examples(held_out_rows) if config.held_out else None,
        validation=validation_sets,
        tokenizer=tokenizer,
        train_rows=rows,
        train_streams=train,
        held_out_streams=held_out,
        validation_streams=validation,
        stores=by_key,
        cuts=cuts,
        held_out_share=config.held_out,
        seed=shuffle,
        notes=(
            *(note for key, store in by_key.items() for note in notes_on(f"data.{key}", store)),
            *(f"data.{SOURCES}.{name}: {each.note}." for name, each in rows.items() if each.note),
            *(f"data.{SOURCES}.{name}, held out: {each.note}." for name, each in held_out_rows.items() if each.note),
            *(f"data.{VALIDATION}.{name}: {each.note}." for name, each in validation_rows.items() if each.note),
        ),
    )


def token_cache(config: DataConfig) -> TokenCache:
    """Return the location of the token stores; raise `UserError` for a URL that is not an object store."""
    given = None if config.local_cache == AUTO else expand(config.local_cache, "data.local_cache")
    local = user_cache() / "pieces" if given is None else Path(given)
    return TokenCache(storage_path(expand(config.cache, "data.cache")), ChunkCache(local))


def build_and_cut(
    config: DataConfig, cache: TokenCache, sequence_length: int, report: Report
) -> tuple[Tokenizer, dict[str, TokenStore], dict[str, int]]:
    """Return the tokenizer, the store of each source, and the index at which each source's held-out end begins, if any.

    The tokens of a source decide whether it has a held-out end. A BPE was trained on that end by then. It is trained
    again on the text before the end; the position of the end in the text does not change.
    """
    tokenizer, stores = build_stores(config, cache, report)
    found = {
        name: end_cut(store, config.held_out, sequence_length, source.packing, source.rows_together)
        for (name, store), source in zip(stores.items(), config.sources.values(), strict=True)
    }
    cuts = {name: cut for name, cut in found.items() if cut is not None}
    if not cuts or config.tokenizer.trained is None:
        return tokenizer, stores, cuts
    ends = {name: end_of(stores[name], cut, tokenizer) for name, cut in cuts.items()}
    tokenizer, stores = build_stores(config, cache, report, ends)
    return tokenizer, stores, {name: cut_of(stores[name], end, tokenizer) for name, end in ends.items()}


def build_stores(
    config: DataConfig, cache: TokenCache, report: Report = silent, ends: Mapping[str, End] = MappingProxyType({})
) -> tuple[Tokenizer, dict[str, TokenStore]]:
    """Return the tokenizer and the store of each source, built where the cache lacks them.

    - `ends`: the held-out ends of sources, which train no tokenizer

    Raises `UserError` if a source or the tokenizer is invalid; the message begins with the source's name.
    """
    if not config.sources:
        raise UserError(
            "data.sources: empty; give at least one, for example "
            "sources: {books: {type: text, files: ['books/*.txt']}}. "
            f"The types are: {', '.join(SourceConfig.get_known_choices())}."
        )
    tokenizer = make_tokenizer(config, cache.root, ends, report)
    return tokenizer, stores_of(SOURCES, config, cache, tokenizer, report)


def stores_of(
    group: str, config: DataConfig, cache: TokenCache, tokenizer: Tokenizer, report: Report
) -> dict[str, TokenStore]:
    """Return the store of each of the configuration's `sources`, or of each in `validation`."""
    workers, stores = config.workers or os.cpu_count() or 1, {}
    for name, source in getattr(config, group).items():
        with naming(f"data.{group}.{name}"):
            stores[name] = build_store(NamedSource(name, source), tokenizer, cache, workers, report)
    return stores


def source_rows(
    group: str, streams: Mapping[str, DocumentStream], sequence_length: int, config: DataConfig, evaluates: bool = True
) -> dict[str, Rows]:
    """Return the rows of streams of `sources` or `validation`; raise `UserError` for a document too long for them."""
    found = {}
    for name, stream in streams.items():
        with naming(f"data.{group}.{name}"):
            packing = config.packing_of(getattr(config, group)[name])
            found[name] = rows_of(stream, sequence_length, packing, evaluates=evaluates)
    return found


def check_rows(sources: Mapping[str, Rows], held_out: float) -> None:
    for name, rows in sources.items():
        if not len(rows):
            raise UserError(
                f"data.sources.{name}: too little text to train on. {rows.needs}; this source has {len(rows.stream)} "
                f"after holding out {held_out:g} of it. Shorten the sequences, give more text, or lower data.held_out."
            )


def check_loss(group: str, sources: Mapping[str, Rows]) -> None:
    for name, rows in sources.items():
        if len(rows) and not rows.targets:
            raise UserError(
                f"{group}.{name}: the loss is on none of its {len(rows.stream):,} tokens. Conversations have it on "
                "messages of the role assistant that loss_on chooses and long_documents keeps: look at the roles of "
                f"the rows and at these settings, or set batch.sequence_length higher.{rows.note and f' {rows.note}.'}"
            )


def notes_on(key: str, store: TokenStore) -> list[str]:
    """Return a note's lines if documents were skipped or are without loss, or special tokens became characters.

    - `key`: of the source, `data.sources.books`
    """
    skipped = store.skipped
    notes = [f"{key}:", *(f"  {line}" for line in format_skipped(skipped))] if skipped.count else []
    if (without := store.unsupervised).count:
        lines = format_skipped(without, "conversation(s) without a token that the loss is on")
        notes += [f"{key}:", *(f"  {line}" for line in lines)]
    found = Counter(store.manifest.get("special_names", {}) if store.is_new else {})
    if note := taken_as_text(found, "the text", "data.tokenizer.parse_special (type file)"):
        notes.append(f"{key}: {note}")
    return notes
