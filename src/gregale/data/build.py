"""Building a token store from a source: by several processes of this host, and together with other hosts."""

import hashlib
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from gregale.atomic_files import machine, os_error_text
from gregale.data.chunk_cache import ChunkCache
from gregale.data.claims import once
from gregale.data.encoder_pool import EncoderPool
from gregale.data.parts import CorruptPart, EncodeTask, discard, json_sha256, make_tasks, sealed_parts, token_dtype
from gregale.data.progress import Report
from gregale.data.sources import Skipped, SourceConfig
from gregale.data.store import FORMAT, MANIFEST_NAME, TokenStore, complete_store, in_words, open_store, sealed
from gregale.data.tokenizers import Tokenizer
from gregale.errors import UserError
from gregale.storage import StoragePath

POLL_SECONDS = 0.5
LOOK_SECONDS = 5.0  # between two looks at what other hosts have sealed


@dataclass(frozen=True)
class NamedSource:
    """A source with the name that the configuration gives it, for messages and progress."""

    name: str
    config: SourceConfig


@dataclass(frozen=True)
class TokenCache:
    """Where token stores lie.

    Attributes:
        place: of all stores: a folder, or a prefix in an object store.
        disk: keeps what is read of an object store.
    """

    place: StoragePath
    disk: ChunkCache


def store_key(source: SourceConfig, tokenizer: Tokenizer) -> str:
    """The name of the store that a source and a tokenizer make: a hash of all that its content depends on."""
    return key_of(FORMAT, source.identity(), tokenizer.fingerprint)


def key_of(version: int, identity: dict, tokenizer: str) -> str:
    """The name of a store in a version of the format, by what tells its source and its tokenizer from others."""
    return json_sha256([version, identity, tokenizer])[:24]


def build_store(
    source: NamedSource, tokenizer: Tokenizer, cache: TokenCache, workers: int, report: Report
) -> TokenStore:
    """Opens the store of a source, after building it if the cache does not have it.

    One process of each host encodes, with as many processes as it may use, and all hosts that see the same cache do so
    together. A build goes on from the parts that an earlier one has sealed.

    Args:
        source: the source and its name.
        tokenizer: encodes its text.
        cache: of all stores.
        workers: most processes to use.
        report: told the bytes of input encoded so far, by all hosts together.

    Raises:
        UserError: the source cannot be read, has no tokens, or has one outside the vocabulary; or the cache's store is
            not what was written.
    """
    folder = cache.place / store_key(source.config, tokenizer)
    if not is_complete(folder):
        build = Build(source, tokenizer, folder, workers, report)
        with writing(cache.place):
            folder.mkdir(parents=True, exist_ok=True)
            build()
    return open_store(folder, cache.disk)


def is_complete(folder: StoragePath) -> bool:
    return (folder / MANIFEST_NAME).is_file()


@contextmanager
def writing(cache: StoragePath) -> Iterator[None]:
    """Says that a cache cannot be written to, where the system does."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"data.cache: {cache} cannot be written to ({os_error_text(error)}). The parts that are finished "
            "stay, and the same command goes on from them."
        ) from error


class Build:
    """What this process does of the building of a store.

    Each host takes the parts in an order of its own, drawn by chance, and skips those that are sealed when their turn
    comes. So hosts need not agree; two of them sometimes encode the same part at once, and write the same bytes.
    """

    def __init__(self, source: NamedSource, tokenizer: Tokenizer, folder: StoragePath, workers: int, report: Report):
        self._name, self._tokenizer, self._folder, self._report = source.name, tokenizer, folder, report
        self._tasks = make_tasks(source.config)
        self._workers = workers if len(self._tasks) > 1 else 1
        self._identity = source.config.identity()
        self.host = hashlib.sha256(machine().encode()).hexdigest()[:8]
        self._sealed: set[int] = set()
        self._looked = float("-inf")
        self._told = -1 if len(self._tasks) > 1 else 0  # one task is done at once

    def __call__(self) -> None:
        """Returns when the store is complete."""
        while not is_complete(self._folder):
            once(self._folder / f"encoding-{self.host}.claim", self._encode, self._is_complete, self._tell)
            once(self._folder / "completing.claim", self._finish, self._is_complete, self._tell)

    def _is_complete(self) -> bool:
        return is_complete(self._folder)

    def _encode(self) -> None:
        """Encodes the parts that are not sealed, until all are."""
        self._sealed, self._looked = set(), float("-inf")
        self._tell()
        left = [task for task in self._tasks if task.number not in self._sealed]
        random.SystemRandom().shuffle(left)
        with EncoderPool(self._workers, self._tokenizer, self._folder) as workers:
            while left or len(workers):
                while left and len(workers) < (1 if self._workers == 1 else 2 * self._workers):
                    task = left.pop()
                    if task.number not in self._sealed:
                        workers.start(task)
                self._sealed |= {task.number for task in workers.finished(POLL_SECONDS)}
                self._tell()

    def _finish(self) -> None:
        """Makes all parts a store; what it finds to be damaged is to be encoded again."""
        try:
            seals = [sealed(self._folder, task.number) for task in self._tasks]
            skipped = Skipped()
            for seal in seals:
                skipped.add(Skipped(**seal.skipped))
            if not any(seal.tokens for seal in seals):
                left_out = in_words(skipped) if skipped.count else []
                message = f"empty: no document with any text in {self._size(self._tasks)} bytes of input."
                raise UserError(" ".join([message, *left_out]))
            description = {
                "dtype": token_dtype(self._tokenizer.vocabulary_size).name,
                "tokenizer": self._tokenizer.fingerprint,
                "source": self._identity,
            } | ({"skipped": asdict(skipped)} if skipped.count else {})
            complete_store(self._folder, seals, description, self._report)
        except CorruptPart as damaged:
            discard(self._folder, damaged.number)

    def _tell(self) -> None:
        """Looks, now and then, at what all hosts have sealed, and reports."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            self._sealed |= sealed_parts(self._folder)
        done = self._size([task for task in self._tasks if task.number in self._sealed])
        if done != self._told:
            self._told = done
            self._report(self._name, done, self._size(self._tasks))

    def _size(self, tasks: list[EncodeTask]) -> int:
        return sum(task.size_bytes for task in tasks)
