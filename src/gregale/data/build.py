"""The build of a token store: hosts claim parts of the sources, and processes encode them.

The processes import this module and its dependencies. It must never import JAX, which would take a device and seconds
of start-up in each of them.

A claim is a lease (`storage.lease`), and its holder does the work. If the claim does not change for `LOST_SECONDS`, or
its process has exited on this machine, another process removes the claim and continues. This needs no locks, which
object stores and many network disks lack.

Only time depends on the claim: two processes that do the same work after a pause or a race write the same bytes.
"""

import hashlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import connection

from gregale.atomic_files import machine, os_error_text
from gregale.data.sources import Skipped, SourceConfig
from gregale.data.sources.base import CHANGED
from gregale.data.store import (
    FORMAT,
    MANIFEST_NAME,
    MENDING,
    ChunkCache,
    CorruptPart,
    EncodeTask,
    Report,
    TokenStore,
    complete_store,
    discard,
    encode_part,
    finished_parts,
    format_skipped,
    json_sha256,
    make_tasks,
    open_store,
    require_manifest,
    token_dtype,
)
from gregale.data.tokenizers import Tokenizer, from_json
from gregale.errors import UserError
from gregale.storage import StoragePath, create
from gregale.storage.lease import HeldLease, LeaseRecord

UNGUARDED = "A script that calls this must do so under `if __name__ == '__main__':`, which Python's processes need."


class EncoderPool:
    """Encodes parts in worker processes, or in this process if the limit is one; use it in a `with` statement."""

    def __init__(self, max_processes: int, tokenizer: Tokenizer, folder: StoragePath):
        self._max_processes = max_processes
        self._tokenizer, self._folder = tokenizer, folder
        self._pool = None
        if max_processes > 1:
            context = multiprocessing.get_context("spawn")  # a worker starts when it has work
            self._pool = ProcessPoolExecutor(max_processes, context, start_worker, (tokenizer.saved(), type(tokenizer)))
        self._running: dict[Future, EncodeTask] = {}
        self._others = set(multiprocessing.active_children())

    def __len__(self) -> int:
        """Return the number of parts in progress."""
        return len(self._running)

    def __enter__(self) -> "EncoderPool":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._pool is None:
            return
        if kind is not None:  # after an error or Ctrl-C, do not wait for parts in progress
            for process in set(multiprocessing.active_children()) - self._others:
                process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def start(self, task: EncodeTask) -> None:
        """Start to encode a part; without worker processes, encode it now."""
        if self._pool is None:
            done: Future = Future()
            self._running[done] = task
            encode_part(task, self._tokenizer, self._folder)
            done.set_result(None)
        else:
            self._running[self._pool.submit(encode_in_worker, task, self._folder)] = task

    def finished(self, timeout_seconds: float) -> list[EncodeTask]:
        """Return the parts finished since the last call, after at least one has; raise a worker's error."""
        done, _ = wait(self._running, timeout_seconds, FIRST_COMPLETED)
        try:
            for future in done:
                future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "A process that encodes text died. Either memory ran out (fewer processes need less: lower "
                f"data.workers), or: {UNGUARDED}"
            ) from error
        return [self._running.pop(future) for future in done]


_tokenizer_of_worker: list[Tokenizer] = []  # created when a worker starts: a large vocabulary takes a second


def encode_in_worker(task: EncodeTask, folder: StoragePath) -> None:
    encode_part(task, _tokenizer_of_worker[0], folder)


def start_worker(description: dict, kind: type[Tokenizer]) -> None:
    """Create the tokenizer, ignore Ctrl-C, and exit when the parent exits, even if it is killed.

    - `kind`: unused: to unpickle the class imports its module, which registers a tokenizer of one's own
    """
    del kind
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a process already
    _tokenizer_of_worker[:] = [from_json(description, "the tokenizer")]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


BEAT_SECONDS = 5.0
LOST_SECONDS = 30.0


def once(
    claim: StoragePath,
    work: Callable[[], None],
    is_done: Callable[[], bool],
    waiting: Callable[[], None] = lambda: None,
) -> None:
    """Do the work unless another process does it; return when it is done or this process has tried it.

    - `claim`: the file by which the processes coordinate; its folder must exist
    - `waiting`: called repeatedly while another process works

    Raises `UserError` if the parent process does the work and would wait for this process.
    """
    last, since = None, time.monotonic()
    mine = LeaseRecord.of_this_process()
    while not is_done():
        found = LeaseRecord.read(claim)
        if found is None and create(claim, mine.to_bytes()):
            with HeldLease(claim, mine, "claim").renewing(BEAT_SECONDS):
                return work()
        if found is not None and (found.machine, found.pid) == (mine.machine, os.getppid()):
            raise UserError(f"{claim}: the parent process is at work. {UNGUARDED}")
        has_expired = found == last and time.monotonic() - since > LOST_SECONDS
        if has_expired or (found is not None and found.is_abandoned):
            claim.unlink(missing_ok=True)
            continue
        if found != last:
            last, since = found, time.monotonic()
        waiting()
        time.sleep(POLL_SECONDS)


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
