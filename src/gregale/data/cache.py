"""What lies in a cache folder, and how it goes: token stores, trained tokenizers, and what killed builds left.

And the programs that `gregale.services.compiled` keeps in a cache folder of their own.
"""

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gregale.data.build import SOURCE_NAME
from gregale.data.sharing import Crew
from gregale.data.store import MANIFEST_NAME, TOKENS_NAME, read_manifest
from gregale.data.tokenizers import SAVED_NAME
from gregale.errors import UserError
from gregale.files import Taken, acquire
from gregale.storage import is_url

STORE = re.compile(r"[0-9a-f]{24}")
TOKENIZER = re.compile(r"tokenizer-[0-9a-f]{24}")
PARTS = re.compile(r"([0-9a-f]{24})\.parts")
PROGRAMS = re.compile(r"compiled-[0-9a-f]{24}")
LEFTOVER = re.compile(r"\.([0-9a-f]{24})\.(.+)\.[^.]+")  # of a store's key, the host that built it, and a random end
LOCK = re.compile(rf"({STORE.pattern}|{TOKENIZER.pattern}|{PROGRAMS.pattern})\.lock")
DAY_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Entry:
    """One folder of a cache.

    Attributes:
        folder: where it lies.
        kind: `token store`, `parts of a store`, `tokenizer`, `compiled programs` or `leftover`.
        size_bytes: of all its files.
        used: when it was last opened or built, in seconds since 1970.
        origin: what it was made of, in words; empty where that is not known.
        is_stale: no run can use it any more: a leftover, a damaged store, or one whose files have changed or are gone.
    """

    folder: Path
    kind: str
    size_bytes: int
    used: float
    origin: str
    is_stale: bool

    @property
    def lock(self) -> Path:
        """The file that who builds it, or opens it, holds a lock on."""
        found = LEFTOVER.fullmatch(self.folder.name) or PARTS.fullmatch(self.folder.name)
        return self.folder.with_name(f"{found[1] if found else self.folder.name}.lock")


def entries(cache: Path) -> list[Entry]:
    """What is in a cache, by last use; whatever else lies in the folder is passed over.

    Raises:
        UserError: there is no such folder, or it is no cache.
    """
    try:
        paths = list(cache.iterdir())
        folders = [path for path in paths if path.is_dir() and not path.is_symlink()]
        found = [entry for path in folders if (entry := entry_of(path)) is not None]
    except OSError as error:
        raise UserError(f"{cache}: no cache can be read there ({error.strerror}).") from error
    if paths and not found and not any(LOCK.fullmatch(path.name) for path in paths):
        raise UserError(
            f"{cache} is no cache of token stores or programs: nothing in it was made by `gregale train` or "
            "`gregale tokenize`. Give the folder that `data.cache` or `compilation_cache` names."
        )
    return sorted(found, key=lambda entry: (entry.used, entry.folder.name))


def entry_of(folder: Path) -> Entry | None:
    """None if a folder is nothing that a cache has."""
    name = folder.name
    if STORE.fullmatch(name) and any((folder / file).exists() for file in (MANIFEST_NAME, TOKENS_NAME)):
        origin, is_stale = origin_of(folder / MANIFEST_NAME, lambda path: read_manifest(path)["source"])
        return Entry(folder, "token store", size_of(folder), last_use(folder), origin, is_stale)
    if (found := PARTS.fullmatch(name)) is not None:
        origin, is_stale = origin_of(folder / SOURCE_NAME, lambda path: json.loads(path.read_bytes())["source"])
        is_stale |= (folder.with_name(found[1]) / MANIFEST_NAME).exists()
        return Entry(folder, "parts of a store", size_of(folder), newest(folder), origin, is_stale)
    if TOKENIZER.fullmatch(name):
        return Entry(folder, "tokenizer", size_of(folder), last_use(folder), "", not (folder / SAVED_NAME).is_file())
    if PROGRAMS.fullmatch(name):
        return Entry(folder, "compiled programs", size_of(folder), newest(folder), "", False)
    if (leftover := LEFTOVER.fullmatch(name)) is not None:
        return Entry(folder, "leftover", size_of(folder), newest(folder), f"of a build on {leftover[2]}", True)
    return None


def origin_of(path: Path, source_in: Callable[[Path], dict]) -> tuple[str, bool]:
    """What a store is made of, by a file that says so, and whether it is stale."""
    try:
        source = source_in(path)
    except (UserError, OSError, ValueError, KeyError):
        return "damaged", True
    files = source.get("files")
    if not files:
        return json.dumps(source, sort_keys=True), False
    first = files[0][0]
    words = f"{source['type']}, {first}" + (f" and {len(files) - 1:,} more" if len(files) > 1 else "")
    gone = [path for path, size, modified_ns in files if not is_as_it_was(path, size, modified_ns)]
    return (f"{words}; {len(gone):,} of them changed or gone", True) if gone else (words, False)


def is_as_it_was(path: str, size: int, modified_ns: int | str) -> bool:
    if is_url(path):  # nobody asks a store for each of its objects
        return True
    try:
        found = os.stat(path)
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (size, modified_ns)


def files_below(folder: Path) -> Iterator[os.stat_result]:
    """What the system says of every file below a folder that another process may be deleting."""
    for path in folder.rglob("*"):
        try:
            yield path.lstat()
        except FileNotFoundError:
            continue


def size_of(folder: Path) -> int:
    return sum(found.st_size for found in files_below(folder))


def newest(folder: Path) -> float:
    """When anything in a folder last changed."""
    return max([found.st_mtime for found in files_below(folder)], default=folder.stat().st_mtime)


def last_use(folder: Path) -> float:
    """Who opens a store or a tokenizer, or builds it, writes its lock."""
    lock = folder.with_name(f"{folder.name}.lock")
    return lock.stat().st_mtime if lock.exists() else newest(folder)


def remove(entry: Entry) -> bool:
    """Deletes an entry, unless a build may be at work on it; returns whether it did.

    It first gets a name that no build looks for. Runs that have the store open keep what they have mapped.

    Raises:
        OSError: it cannot be deleted.
    """
    if is_at_work(entry):
        return False
    try:
        lock = acquire(entry.lock)
    except Taken:
        return False
    with lock:
        key = entry.lock.stem.rpartition("-")[2]
        doomed = entry.folder.with_name(f".{key}.{socket.gethostname()}.cleaned")
        if entry.kind != "leftover":
            shutil.rmtree(doomed, ignore_errors=True)
            entry.folder.rename(doomed)
        shutil.rmtree(entry.folder if entry.kind == "leftover" else doomed)
        entry.lock.unlink(missing_ok=True)  # who waits for it sees that, and makes another
    return True


def is_at_work(entry: Entry) -> bool:
    """Whether a build may be at work on a leftover or on parts: where locks do not reach, only age tells."""
    if time.time() - entry.used >= DAY_SECONDS:
        return False
    if entry.kind == "parts of a store":
        return bool(Crew(entry.folder).look())
    found = LEFTOVER.fullmatch(entry.folder.name)
    return found is not None and found[2] != socket.gethostname()
