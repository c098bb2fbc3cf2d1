"""Building a token store from a source, in parallel.

The worker processes import this module and what it needs; it must never import JAX, which would take a device and
seconds of start-up in every one of them.
"""

import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gregale.data.progress import Report
from gregale.data.sources import Document, Part, Skipped, SourceConfig
from gregale.data.store import FORMAT, TOKENS_NAME, TokenStore, finish_store, flush, json_sha256, open_store
from gregale.data.tokenizers import Tokenizer, from_json
from gregale.errors import UserError
from gregale.files import Taken, acquire, sign

TASK_BYTES = 16 << 20
UNGUARDED = "A script that calls this must do so under `if __name__ == '__main__':`, which Python's processes need."


@dataclass(frozen=True)
class Task:
    """Consecutive parts of a source, for one process to encode into one file."""

    source: SourceConfig
    parts: tuple[Part, ...]
    tokenizer: dict
    output: Path

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


class Encoded(NamedTuple):
    """What came of a task: the documents' lengths in tokens, int64 [document], and what could not be read."""

    lengths: np.ndarray
    skipped: Skipped


@dataclass(frozen=True)
class NamedSource:
    """A source with the name that the configuration gives it, for messages and progress."""

    name: str
    config: SourceConfig


def store_key(source: SourceConfig, tokenizer: Tokenizer) -> str:
    """The name of the store that a source and a tokenizer make: a hash of all that its content depends on."""
    return json_sha256([FORMAT, source.identity(), tokenizer.fingerprint])[:24]


def build_store(source: NamedSource, tokenizer: Tokenizer, cache: Path, workers: int, report: Report) -> TokenStore:
    """Opens the store of a source, after building it if the cache does not have it.

    It is written under a temporary name and renamed when it is complete. A second builder waits for the first and then
    opens what that one built; and what has to be verified, one of them verifies for all.

    Args:
        source: the source and its name.
        tokenizer: encodes its text.
        cache: folder of all stores.
        workers: most processes to use.
        report: told the bytes of input encoded so far.

    Raises:
        UserError: the source cannot be read, has no tokens, or has one outside the vocabulary; or the cache's store is
            not what was written.
    """
    folder = cache / store_key(source.config, tokenizer)
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            prefix = f".{folder.name}.{socket.gethostname()}."
            for leftover in cache.glob(f"{prefix}*"):  # of a builder that was killed: its lock is gone
                shutil.rmtree(leftover, ignore_errors=True)
            temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=cache))
            try:
                write_store(source, tokenizer, temporary, workers, report)
                publish(temporary, folder)
            except OSError as error:
                raise UserError(f"{cache}: the token store could not be written there ({error}).") from error
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        store = open_store(folder)
        store.verify_once(f"checking {source.name}", report)
    return store


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock that the system gives back when the process ends, however it ends; makes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = acquire(path)
    except OSError as error:
        raise UserError(f"data.cache: {path.parent} cannot be written to ({error.strerror}).") from error
    except Taken as taken:
        if taken.holder and taken.holder.pid == os.getppid():
            # a worker that runs its parent's script again would wait for ever
            raise UserError(f"{path}: the parent process holds it. {UNGUARDED}") from None
        file = acquire(path, wait=True)
    with file:
        sign(file)
        yield


def publish(temporary: Path, folder: Path) -> None:
    """Gives a complete store its name; where locks do not reach (some network disks) another may have come first."""
    temporary.chmod(0o755)
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.exists():
            raise
    flush(folder.parent)


def write_store(source: NamedSource, tokenizer: Tokenizer, folder: Path, workers: int, report: Report) -> None:
    """Encodes a source into an empty folder."""
    tasks = make_tasks(source.config, tokenizer, folder)
    total = sum(task.size_bytes for task in tasks)
    lengths, skipped, done = [], Skipped(), 0
    with open(folder / TOKENS_NAME, "wb") as tokens:
        for task, found in zip(tasks, run_tasks(tasks, workers), strict=True):
            with open(task.output, "rb") as encoded:
                shutil.copyfileobj(encoded, tokens, 1 << 20)
            task.output.unlink()
            lengths.append(found.lengths)
            skipped.add(found.skipped)
            done += task.size_bytes
            report(source.name, done, total)
    offsets = np.concatenate([[0], *lengths]).cumsum(dtype=np.int64)
    if offsets[-1] == 0:
        left_out = in_words(skipped) if skipped.count else []
        raise UserError(" ".join([f"empty: no document with any text in {total} bytes of input.", *left_out]))
    description = {
        "dtype": token_dtype(tokenizer.vocabulary_size).name,
        "tokenizer": tokenizer.fingerprint,
        "source": source.config.identity(),
    }
    finish_store(folder, offsets, description | ({"skipped": asdict(skipped)} if skipped.count else {}))


def skipped_in(store: TokenStore) -> Skipped:
    """What was left out when a store was built."""
    return Skipped(**store.manifest.get("skipped", {}))


def in_words(skipped: Skipped) -> list[str]:
    """How many documents were left out and where the first few stand, a line each."""
    more = skipped.count - len(skipped.first)
    count = f"{skipped.count:,} bad document(s) skipped{', the first' if more else ''}:"
    return [count, *skipped.first, *([f"and {more:,} more"] if more else [])]


def make_tasks(source: SourceConfig, tokenizer: Tokenizer, folder: Path) -> list[Task]:
    """Groups the parts of a source into tasks of about `TASK_BYTES`."""
    groups: list[list[Part]] = [[]]
    size = 0
    for part in source.parts():
        if size >= TASK_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.size_bytes
    description = tokenizer.to_json()
    return [Task(source, tuple(group), description, folder / f"part-{n}") for n, group in enumerate(groups)]


def run_tasks(tasks: list[Task], workers: int) -> Iterator[Encoded]:
    """What came of each task, in order; a single task is not worth starting processes for."""
    if min(workers, len(tasks)) == 1:
        yield from map(encode_task, tasks)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(tasks)), mp_context=context, initializer=start_worker)
    try:
        yield from pool.map(encode_task, tasks)
    except BrokenProcessPool as error:
        raise UserError(
            "A process that encodes text died. Either memory ran out (fewer processes need less: lower data.workers), "
            f"or: {UNGUARDED}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker() -> None:
    """Leaves Ctrl-C to the parent, and ends this process when the parent is gone, even if that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def encode_task(task: Task) -> Encoded:
    """Encodes the documents of a task into its output file."""
    tokenizer = from_json(task.tokenizer, "the tokenizer")
    dtype = token_dtype(tokenizer.vocabulary_size)
    lengths, skipped = [], Skipped()
    with open(task.output, "wb") as output:
        for part in task.parts:
            for document in task.source.read(part, skipped):
                ids = encode_document(document, tokenizer)
                if len(ids):
                    np.append(ids, tokenizer.end_of_document).astype(dtype.newbyteorder("<")).tofile(output)
                    lengths.append(len(ids) + 1)
    return Encoded(np.array(lengths, np.int64), skipped)


def encode_document(document: Document, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of a document [token], without its end."""
    if isinstance(document.content, str):
        return tokenizer.encode(document.content)
    bad = np.flatnonzero((document.content < 0) | (document.content >= tokenizer.vocabulary_size))
    if len(bad):
        raise UserError(
            f"{document.path}, token {document.start + bad[0]}: id {document.content[bad[0]]} is outside the "
            f"vocabulary, 0 to {tokenizer.vocabulary_size - 1}. The file was made with another tokenizer, or is of "
            "another dtype."
        )
    return document.content


def token_dtype(vocabulary_size: int) -> np.dtype:
    """The smallest unsigned type that holds every id."""
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)
