"""The data part of a configuration, and preparing what it describes."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from gregale.data.build import Cache, NamedSource, build_store
from gregale.data.disk import Disk
from gregale.data.examples import Examples, Windows, held_out_examples, training_examples, validation_examples
from gregale.data.late import DoneParts, LateParts, Parts, open_parts
from gregale.data.mixtures import ReplicaExamples, check_mixtures, replica_examples
from gregale.data.notes import notes_on, uncounted
from gregale.data.order import PART_FORMAT, LateExamples, Split, WholeStreams, content_of, training_by_parts
from gregale.data.progress import Report, silent
from gregale.data.sources import SourceConfig
from gregale.data.sources.base import expand
from gregale.data.split import End, cut_of, end_cut, end_of, split_at
from gregale.data.store import TokenStore, json_sha256
from gregale.data.stream import DocumentStream, Stream
from gregale.data.tokenizers import (
    BpeConfig,
    BytesConfig,
    Tokenizer,
    TokenizerConfig,
)
from gregale.data.training_texts import make_tokenizer, naming
from gregale.errors import KeyedError, UserError
from gregale.files import user_cache
from gregale.settings import Fixed, Range, Settings, at_least, check_path, whole
from gregale.storage import place

ORDER = Fixed("examples would come in another order, which repeats and leaves out some")
AUTO = "auto"
WHOLE, PARTS = ORDERS = ("whole", "parts")
SOURCES, VALIDATION = "sources", "validation"


@dataclass(frozen=True)
class DataConfig(Settings):
    """Which text to train on, and how it becomes examples."""

    sources: dict[str, SourceConfig] = field(
        default_factory=dict, metadata={"help": "documents, by a name of your choice"}
    )
    tokenizer: TokenizerConfig = field(
        default_factory=BytesConfig,
        metadata={
            "help": "what turns text into tokens: bytes, file or bpe",
            "fixed": Fixed("the saved parameters were trained on its tokens"),
        },
    )
    validation: dict[str, SourceConfig] = field(
        default_factory=dict,
        metadata={"help": "only evaluated on", "keys_of": "data.sources"},
    )
    held_out: float = field(
        default=0.02,
        metadata={
            "help": "share kept to evaluate; 0: nothing",
            "range": Range(0, 1, below=True),
            "aliases": ("val_split", "validation_split", "val_fraction", "eval_fraction", "test_size"),
            "fixed": Fixed("what would be held out now has been trained on"),
        },
    )
    shuffle: bool = field(default=True, metadata={"help": "random order, anew each epoch", "fixed": ORDER})
    cross_documents: bool = field(default=False, metadata={"help": "let attention and loss cross documents"})
    replica_mixtures: list[dict[str, float]] = field(
        default_factory=list,
        metadata={"help": "for each DiLoCo replica its own weights", "range": at_least(0), "fixed": ORDER},
    )
    cache: str = field(default="cache", metadata={"help": "folder or URL; tokenized text for later runs"})
    local_cache: str = field(default=AUTO, metadata={"help": "of pieces read of a URL; auto: ~/.cache/gregale"})
    order: str = field(
        default=WHOLE,
        metadata={"help": "shuffle all, or by parts as they are ready", "choices": ORDERS, "fixed": ORDER},
    )
    workers: int = field(
        default=0, metadata={"help": "processes that tokenize; 0: one for each core", "range": whole(0, 4096)}
    )

    def __post_init__(self):
        super().__post_init__()
        for key in ("cache", "local_cache"):
            check_path(key, getattr(self, key))
        for key in (SOURCES, VALIDATION):
            if "" in getattr(self, key):
                raise KeyedError(key, "has a source whose name is empty", "; give it a name, for example `books`.")
        check_mixtures(self.replica_mixtures, self.sources)
        if self.order == PARTS and self.replica_mixtures:
            raise UserError(
                "data.order: parts, and data.replica_mixtures cuts a source by its whole length, which is not known "
                "before all of it is tokenized. Leave one of them out."
            )
        if self.order == PARTS and isinstance(self.tokenizer, BpeConfig):
            raise UserError(
                "data.order: parts begins to train before all of the text is read, and data.tokenizer: bpe is trained "
                "on all of it. Give a tokenizer that is there: save this one's tokenizer.json and use type file."
            )
        for name, source in self.validation.items():
            if source.weight != 1:
                raise UserError(
                    f"data.validation.{name}.weight: {source.weight:g} found, but a validation source is evaluated by "
                    "itself, not mixed with others. Leave weight out."
                )

    def token_cache(self) -> Cache:
        """Where the token stores lie; raises `UserError` for the URL of what is no store."""
        given = None if self.local_cache == AUTO else expand(self.local_cache, "data.local_cache")
        local = user_cache() / "pieces" if given is None else Path(given)
        return Cache(place(expand(self.cache, "data.cache")), Disk(local))

    @property
    def evaluates(self) -> bool:
        """Whether there is any text to evaluate on."""
        return self.held_out > 0 or bool(self.validation)


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
        parts: by source, its parts, if they are trained on in the order by parts; they may still be encoded.
        fingerprint: a hash of the tokens, the tokenizer and the split; equal on every host of a job that reads the same
            data, and when a job resumes. Validation sources have no part in it.
        notes: lines that the user should see, such as how many documents were skipped.
    """

    train: Examples | ReplicaExamples
    held_out: Examples | None
    validation: dict[str, Examples]
    tokenizer: Tokenizer
    train_streams: Mapping[str, Stream]
    held_out_streams: Mapping[str, Stream]
    validation_streams: dict[str, DocumentStream]
    stores: dict[str, TokenStore]
    fingerprint: str
    notes: tuple[str, ...]
    parts: Mapping[str, Parts] = field(default_factory=dict)

    @property
    def training_tokens(self) -> int:
        """Tokens of one epoch of every source; waits for all that is still encoded."""
        return sum(map(len, self.train_streams.values()))

    @property
    def held_out_tokens(self) -> int:
        return sum(map(len, self.held_out_streams.values()))

    @property
    def may_wait(self) -> bool:
        """Whether a batch may wait for text that is still encoded."""
        return any(isinstance(each, LateParts) for each in self.parts.values())

    def close(self) -> None:
        """Ends what is encoded in the background."""
        for each in self.parts.values():
            each.close()

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
    if config.order == PARTS:
        return prepare_parts(config, sequence_length, seed, report)
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
        notes=notes_on(by_key, tokenizer),
    )


def prepare_parts(config: DataConfig, sequence_length: int, seed: int, report: Report) -> Corpus:
    """As `prepare`, in the order by parts: it waits for the first of them; the rest is encoded in the background."""
    check_sources(config)
    tokenizer = make_tokenizer(config, {}, report)
    validating, validation = validation_of(config, tokenizer, report)
    cores = config.workers or os.cpu_count() or 1
    workers, cache, parts = max(1, cores // len(config.sources)), config.token_cache(), {}
    with ExitStack() as opened:
        for name, source in config.sources.items():
            with naming(f"data.{SOURCES}.{name}"):
                parts[name] = open_parts(NamedSource(name, source), tokenizer, cache, workers, report)
            opened.callback(parts[name].close)
        splits = {name: Split(name, each, config.held_out) for name, each in parts.items()}
        weights = {name: source.weight for name, source in config.sources.items()}
        cross, shuffled = config.cross_documents, seed if config.shuffle else None
        train = training_by_parts(splits, weights, sequence_length, cross, shuffled)
        opened.pop_all()
    identities = {name: content_of(source) for name, source in config.sources.items()}
    return Corpus(
        train=train,
        held_out=LateExamples(list(splits.values()), sequence_length, cross) if config.held_out else None,
        validation={name: validation_windows(name, each, sequence_length, config) for name, each in validation.items()},
        tokenizer=tokenizer,
        train_streams=WholeStreams(splits, held_out=False),
        held_out_streams=WholeStreams(splits, held_out=True),
        validation_streams=validation,
        stores={f"{VALIDATION}.{name}": store for name, store in validating.items()},
        fingerprint=json_sha256([PARTS, PART_FORMAT, identities, tokenizer.fingerprint, config.held_out]),
        notes=(
            *notes_on({f"{VALIDATION}.{name}": store for name, store in validating.items()}, tokenizer),
            *uncounted([each.store for each in parts.values() if isinstance(each, DoneParts)], tokenizer),
        ),
        parts=parts,
    )


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
    tokenizer = make_tokenizer(config, ends, report)
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
    cache, workers = config.token_cache(), config.workers or os.cpu_count() or 1
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
