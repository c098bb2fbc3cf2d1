"""Build a token store from a source, with several processes of one host and together with other hosts."""

import hashlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial

from gregale.atomic_files import machine, os_error_text
from gregale.data.chunk_cache import ChunkCache
from gregale.data.claims import once
from gregale.data.encoder_pool import EncoderPool
from gregale.data.parts import CorruptPart, EncodeTask, discard, finished_parts, json_sha256, make_tasks, token_dtype
from gregale.data.progress import Report
from gregale.data.sources import Skipped, SourceConfig
from gregale.data.sources.base import CHANGED
from gregale.data.store import (
    FORMAT,
    MANIFEST_NAME,
    MENDING,
    TokenStore,
    complete_store,
    format_skipped,
    open_store,
    require_manifest,
)
from gregale.data.tokenizers import Tokenizer
from gregale.errors import UserError
from gregale.storage import StoragePath

MASKS = 3  # version of the rules by which conversations become tokens with loss
POLL_SECONDS = 0.5
POLL_PARTS_SECONDS = 5.0  # between two listings of the parts that other hosts have finished


@dataclass(frozen=True)
class NamedSource:
    """A source with its name in the configuration, for messages and progress."""

    name: str
    config: SourceConfig


@dataclass(frozen=True)
class TokenCache:
    """The folder of all token stores, and this host's cache of data from an object store."""

    root: StoragePath
    disk: ChunkCache


def identity_of(source: SourceConfig, tokenizer: Tokenizer) -> dict:
    """Return everything that determines the content of the store of a source and a tokenizer, as in its manifest."""
    found = {"source": source.identity(), "tokenizer": tokenizer.fingerprint}
    template = tokenizer.chat_template if source.has_conversations else None
    return found | ({"chat_template": [asdict(template), MASKS]} if template else {})


def store_key(identity: dict) -> str:
    """Return the name of a store: a hash of its identity."""
    return json_sha256([FORMAT, *identity.values()])[:24]


def build_store(
    source: NamedSource, tokenizer: Tokenizer, cache: TokenCache, workers: int, report: Report
) -> TokenStore:
    """Open the store of a source; build it first if the cache does not have it.

    One process of each host encodes with up to `workers` processes. All hosts that use the same cache share the work,
    and `report` receives the number of input bytes that they have encoded together. A build continues from the finished
    parts of an earlier build. Raises `UserError` if the source cannot be read, has no tokens, or has one outside the
    vocabulary; or the cached store is damaged.
    """
    identity = identity_of(source.config, tokenizer)
    folder = cache.root / store_key(identity)
    if is_new := not is_complete(folder):
        build = Build(source, tokenizer, folder, workers, report)
        with writing(cache.root):
            folder.mkdir(parents=True, exist_ok=True)
            build()
    store = replace(open_store(folder, cache.disk), is_new=is_new)
    if json_sha256({key: store.manifest.get(key, value) for key, value in identity.items()}) != json_sha256(identity):
        raise UserError(f"{folder} has tokens of another source or tokenizer than its name says. {MENDING}")
    return store


def is_complete(folder: StoragePath) -> bool:
    return (folder / MANIFEST_NAME).is_file()


@contextmanager
def writing(cache: StoragePath) -> Iterator[None]:
    """Turn a write error of the cache into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"data.cache: {cache} cannot be written to ({os_error_text(error)}). The parts that are finished "
            "stay, and the same command goes on from them."
        ) from error


class Build:
    """The share of one process in the build of a store.

    Each host takes the parts in its own random order and skips parts that are finished. So hosts need no agreement. Two
    hosts sometimes encode the same part at once; they write the same bytes.
    """

    def __init__(self, source: NamedSource, tokenizer: Tokenizer, folder: StoragePath, workers: int, report: Report):
        self._name, self._tokenizer, self._folder, self._report = source.name, tokenizer, folder, report
        self._tasks = make_tasks(source.config)
        self._workers = workers if len(self._tasks) > 1 else 1
        self._identity = identity_of(source.config, tokenizer)
        if folder.name != store_key(self._identity):
            raise UserError(f"one of its files {CHANGED}")
        self.host = hashlib.sha256(machine().encode()).hexdigest()[:8]
        self._finished: set[int] = set()
        self._listed_at = float("-inf")
        self._reported = -1 if len(self._tasks) > 1 else 0  # a single task needs no progress report

    def __call__(self) -> None:
        """Build until the store is complete."""
        while not is_complete(self._folder):
            for name, work in ((f"encoding-{self.host}", self._encode), ("completing", self._finish)):
                once(self._folder / f"{name}.claim", work, partial(is_complete, self._folder), self._report_progress)

    def _encode(self) -> None:
        """Encode the unfinished parts until all parts are finished."""
        self._finished, self._listed_at = set(), float("-inf")
        self._report_progress()
        left = [task for task in self._tasks if task.number not in self._finished]
        random.SystemRandom().shuffle(left)
        with EncoderPool(self._workers, self._tokenizer, self._folder) as workers:
            while left or len(workers):
                while left and len(workers) < (1 if self._workers == 1 else 2 * self._workers):
                    task = left.pop()
                    if task.number not in self._finished:
                        workers.start(task)
                self._finished |= {task.number for task in workers.finished(POLL_SECONDS)}
                self._report_progress()

    def _finish(self) -> None:
        """Assemble the store from its parts; discard a damaged part so that it is encoded again."""
        try:
            manifests = [require_manifest(self._folder, task.number) for task in self._tasks]
            skipped, unsupervised, names = Skipped(), Skipped(), Counter()
            for manifest in manifests:
                skipped.add(Skipped(**manifest.skipped))
                unsupervised.add(Skipped(**manifest.unsupervised or {}))
                names.update(manifest.special_names or {})
            if not any(manifest.tokens for manifest in manifests):
                left_out = format_skipped(skipped) if skipped.count else []
                message = f"empty: no document with any text in {self._size(self._tasks)} bytes of input."
                raise UserError(" ".join([message, *left_out]))
            description = {
                "dtype": token_dtype(self._tokenizer.vocabulary_size).name,
                **self._identity,
                **({"skipped": asdict(skipped)} if skipped.count else {}),
                **({"unsupervised": asdict(unsupervised)} if unsupervised.count else {}),
                **({"special_names": dict(names)} if names else {}),
            }
            complete_store(self._folder, manifests, description, self._report)
        except CorruptPart as damaged:
            discard(self._folder, damaged.number)

    def _report_progress(self) -> None:
        """Report progress; list the parts that other hosts have finished at most every `POLL_PARTS_SECONDS`."""
        if time.monotonic() - self._listed_at >= POLL_PARTS_SECONDS:
            self._listed_at = time.monotonic()
            self._finished |= finished_parts(self._folder)
        done = self._size([task for task in self._tasks if task.number in self._finished])
        if done != self._reported:
            self._reported = done
            self._report(self._name, done, self._size(self._tasks))

    def _size(self, tasks: list[EncodeTask]) -> int:
        return sum(task.size_bytes for task in tasks)
