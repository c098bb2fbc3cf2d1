"""Building a token store from a source: by several processes of this host, and together with other hosts."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gregale.data.assembly import put_together
from gregale.data.disk import Disk
from gregale.data.parts import make_tasks
from gregale.data.progress import Report
from gregale.data.remote_store import open_remote, parts_of
from gregale.data.share import POLL_SECONDS, Share
from gregale.data.sharing import Crew
from gregale.data.sources import Skipped, SourceConfig
from gregale.data.store import FORMAT, MANIFEST_NAME, TokenStore, json_sha256, open_store
from gregale.data.tokenizers import Tokenizer
from gregale.data.workers import UNGUARDED, Workers
from gregale.errors import UserError
from gregale.files import Taken, acquire, reason, sign
from gregale.storage import Place, Remote, remove_tree, write_bytes

SOURCE_NAME = "source.json"


class Overtaken(UserError):
    """Another process has completed the store, and removed its parts."""


@dataclass(frozen=True)
class NamedSource:
    """A source with the name that the configuration gives it, for messages and progress."""

    name: str
    config: SourceConfig


def store_key(source: SourceConfig, tokenizer: Tokenizer) -> str:
    """The name of the store that a source and a tokenizer make: a hash of all that its content depends on."""
    return json_sha256([FORMAT, source.identity(), tokenizer.fingerprint])[:24]


@dataclass(frozen=True)
class Cache:
    """Where token stores lie.

    Attributes:
        place: of all stores: a folder, or a prefix in an object store.
        disk: keeps what is read of an object store.
    """

    place: Place
    disk: Disk


def build_store(source: NamedSource, tokenizer: Tokenizer, cache: Cache, workers: int, report: Report) -> TokenStore:
    """Opens the store of a source, after building it if the cache does not have it.

    All processes that want the same store build it together, whatever host they are on, if they see the same cache.
    What a killed one has finished is not done again. It gets its name when it is complete; and what has to be verified,
    one of them verifies for all of its host.

    Args:
        source: the source and its name.
        tokenizer: encodes its text.
        cache: of all stores.
        workers: most processes to use.
        report: told the bytes of input encoded so far.

    Raises:
        UserError: the source cannot be read, has no tokens, or has one outside the vocabulary; or the cache's store is
            not what was written.
    """
    folder = cache.place / store_key(source.config, tokenizer)
    if isinstance(folder, Remote):
        if not is_complete(folder):
            build(source, tokenizer, folder, workers, report)
        return open_remote(folder, cache.disk)
    if not folder.exists():
        build(source, tokenizer, folder, workers, report)
    with locked(folder.with_suffix(".lock")):
        store = open_store(folder)
        store.verify_once(f"checking {source.name}", report)
    return store


def build(source: NamedSource, tokenizer: Tokenizer, folder: Place, workers: int, report: Report) -> None:
    """Does this process's share in building a store; returns when it is complete."""
    with suppress(Overtaken), sharing(source, tokenizer, folder, workers, report) as share:
        tasks, parts = make_tasks(source.config), parts_of(folder)
        while not is_complete(folder):
            share.encode(lambda: is_complete(folder))
            share.finish(
                lambda removes: put_together(tasks, tokenizer, parts, folder, removes, report),
                lambda: is_complete(folder),
            )


@contextmanager
def sharing(
    source: NamedSource, tokenizer: Tokenizer, folder: Place, workers: int, report: Report, reads: bool = False
) -> Iterator[Share]:
    """This process's share in building a store; see `build_store`.

    - `reads`: it reads the parts themselves, which then stay as long as it is there

    Raises `Overtaken` if the parts went while this process came, and `UserError` as `build_store`.
    """
    tasks, parts = make_tasks(source.config), parts_of(folder)
    with usable(folder.parent):
        parts.mkdir(parents=True, exist_ok=True)
    crew = Crew(parts, reads=reads)
    try:
        write_bytes(parts / SOURCE_NAME, json.dumps({"source": source.config.identity()}).encode())
        with crew, Workers(workers if len(tasks) > 1 else 1, tokenizer, parts) as encoders:
            if any(map(crew.is_parent, crew.look())):
                raise UserError(f"{folder}: the parent process builds it. {UNGUARDED}")  # it would wait for ever
            yield Share(source.name, tasks, parts, crew, encoders, report)
    except OSError as error:
        if is_complete(folder):
            raise Overtaken(
                f"{folder.parent}: another process has completed the token store of {source.name} at this very moment. "
                "Give the same command again."
            ) from error
        raise UserError(
            f"{folder.parent}: the token store could not be written there ({reason(error)}). The parts that are "
            "finished stay, and the same command goes on from them."
        ) from error
    finally:
        clear(folder, crew)


def is_complete(folder: Place) -> bool:
    return (folder / MANIFEST_NAME).is_file()


def clear(folder: Place, crew: Crew) -> None:
    """Removes parts that nobody needs any more: those of a complete store on a disk, or if none was finished."""
    parts = parts_of(folder)
    if isinstance(parts, Remote):
        return
    is_needed = not is_complete(folder) and any(parts.glob("part-*.json"))
    with suppress(OSError):
        if not is_needed and not crew.look():
            remove_tree(parts)


@contextmanager
def usable(cache: Place) -> Iterator[None]:
    """Says that a cache cannot be used, where the system does."""
    try:
        yield
    except OSError as error:
        raise UserError(f"data.cache: {cache} cannot be written to ({error.strerror}).") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock that the system gives back when the process ends, however it ends; makes its folder."""
    with usable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = acquire(path)
        except Taken as taken:
            if taken.holder and taken.holder.pid == os.getppid():
                # a worker that runs its parent's script again would wait for ever
                raise UserError(f"{path}: the parent process holds it. {UNGUARDED}") from None
            file = acquire(path, wait=True)
    with file:
        sign(file)
        yield


def once(folder: Place, make: Callable[[], None], is_made: Callable[[], bool]) -> None:
    """Has one of all processes that want it make what a folder of the cache holds; the others wait for it."""
    if not isinstance(folder, Remote):
        with locked(folder.with_suffix(".lock")):
            if not is_made():
                make()
        return
    if not is_made():
        with Crew(parts_of(folder)) as crew:
            while not is_made():
                if crew.claim([0], 1):
                    make()
                else:
                    time.sleep(POLL_SECONDS)


def skipped_in(store: TokenStore) -> Skipped:
    """What was left out when a store was built."""
    return Skipped(**store.manifest.get("skipped", {}))
