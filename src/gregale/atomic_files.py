"""Atomic writes of files, file locks that end with their process, and texts for operating system errors.

Worker processes import this module, so it imports only the standard library.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import get_native_id
from typing import IO

# Errors of a full, protected or broken disk. The user can correct them; they are not defects of this program.
DISK_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE),
    *(errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.EMFILE),
}
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}  # errors of a file system without locks


_RETRY_SECONDS = 0.05
_TEMPORARY = re.compile(r".+\.tmp-([0-9a-f]{8})-(\d{1,7})-\d+")  # machine, process and thread


def os_error_text(error: BaseException) -> str:
    """Return the operating system's text for a failed read or write, with the path if it is known."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    text = " ".join(str(error).split()) or type(error).__name__
    known = (os.strerror(number) for number in DISK_ERRORS)
    return next((message for message in known if message in text), text[:200])


def write_bytes(path: Path, content: bytes, durable: bool = False) -> None:
    """Write a file atomically; after a failure, remove the incomplete temporary file.

    - `durable`: wait until the file is on the disk, and only then rename it
    """
    try:
        with atomic_replace(path) as temporary:
            temporary.write_bytes(content)
            if durable:
                flush(temporary)
        if durable:
            flush(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or a folder; rename it to `path` at the end, or remove it after a failure."""
    temporary = temporary_beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        remove(temporary)


def temporary_beside(path: Path) -> Path:
    """Return a temporary path in a path's folder that only this thread uses; the caller renames the result.

    The first call for a folder removes the temporary files that killed processes of this machine left there.
    """
    _sweep(str(path.parent))
    return path.with_name(f"{path.name}.tmp-{_machine()}-{os.getpid()}-{get_native_id()}")


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@cache
def _sweep(folder: str) -> None:
    """Remove temporary files and folders of dead processes; cached, because listing the folder costs time."""
    with suppress(OSError):
        for path in Path(folder).iterdir():
            found = _TEMPORARY.fullmatch(path.name)
            if found and found[1] == _machine() and is_process_dead(int(found[2])):
                remove(path)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content; ignore errors."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_oldest(paths: Iterable[Path], limit: float, target: float) -> None:
    """If files have more than `limit` bytes, remove the least recently used until `target` bytes are left.

    The times are the file system's; files that other processes remove meanwhile are skipped.
    """
    found = []
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            found.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, path))
    size = sum(each for _, each, _ in found)
    if size <= limit:
        return
    for _, each, path in sorted(found):
        if size <= target:
            return
        remove(path)
        size -= each


def is_process_dead(pid: int) -> bool:
    """Return whether no running process of this machine, or of this container, has this process id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        return False
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        return state == "Z"  # it has ended, and its parent has not read its exit status
    return False


def machine() -> str:
    """Return a text that identifies the machine, its boot and the container: the scope of a process id."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
    with suppress(OSError):
        names.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(names)


@cache
def _machine() -> str:
    return hashlib.sha256(machine().encode()).hexdigest()[:8]


def user_cache() -> Path:
    """Return the folder `gregale` in the user's cache directory (XDG base directory specification)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "gregale"


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock, or that held it last."""

    host: str
    pid: int
    since: float  # seconds since 1970, by the clock of that process's host

    @staticmethod
    def this_process() -> "LockHolder":
        return LockHolder(socket.gethostname(), os.getpid(), time.time())

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


class LockHeld(Exception):
    def __init__(self, holder: LockHolder | None):
        super().__init__(str(holder) if holder else "another process")
        self.holder = holder


def acquire(path: Path) -> IO[str]:
    """Lock a file, which is created if absent, and return it open; closing the file releases the lock.

    If the file was removed or renamed meanwhile, other processes see another file, so the lock is taken again.
    `is_held` takes the lock for a moment, so a failure is retried once. Raises `LockHeld` after the second failure.
    """
    has_failed = False
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(file, path):
                return file
        except BlockingIOError:
            with file:
                if has_failed:
                    raise LockHeld(holder_of(file)) from None
            has_failed = True
            time.sleep(_RETRY_SECONDS)
            continue
        except BaseException:
            file.close()
            raise
        file.close()


@contextmanager
def locked(path: Path) -> Iterator[IO[str] | None]:
    """Hold a file's lock inside the block, with this process as its holder; raise `LockHeld` if another has it.

    Yield the file, or None on a file system without locks.
    """
    try:
        file = acquire(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        yield None
        return
    with file:
        write_holder(file)
        yield file


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock of a file; False if there is no file or it cannot be opened."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def holder_of(file: IO[str]) -> LockHolder | None:
    """Return the holder that a lock file names; None if it names none, or is not yet complete."""
    file.seek(0)
    try:
        found = json.loads(file.read())
        return LockHolder(found["host"], found["pid"], found["since"])
    except (ValueError, TypeError, KeyError):
        return None


def write_holder(file: IO[str]) -> LockHolder:
    """Write this process's name into a lock file that it holds; ignore write errors, as the lock is held anyway."""
    mine = LockHolder.this_process()
    with suppress(OSError):
        file.truncate(0)
        file.write(json.dumps(asdict(mine)))
        file.flush()
    return mine
