"""Files that are whole or not there, locks that end with their process, and what the system says of a failure.

Worker processes import this module: it imports nothing but the standard library.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import get_native_id
from typing import IO

# What a full, protected or broken disk says: for the user to mend, and not a mistake of this program.
OF_THE_DISK = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE),
    *(errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.EMFILE),
}
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}  # of a file system that has none


_LOOK_SECONDS = 0.05
_TEMPORARY = re.compile(r".+\.tmp-([0-9a-f]{8})-(\d{1,7})-\d+")  # of the machine, the process and the thread


def os_error_text(error: BaseException) -> str:
    """Why something could not be read or written, in the system's few words and with the file if it is known."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    text = " ".join(str(error).split()) or type(error).__name__
    known = (os.strerror(number) for number in OF_THE_DISK)
    return next((words for words in known if words in text), text[:200])


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all; what a failure leaves half-written is removed."""
    try:
        with atomic_replace(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """A name to write a file or a folder under, which then gets the path's name, or goes if anything fails."""
    temporary = temporary_beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        remove(temporary)


def temporary_beside(path: Path) -> Path:
    """A name in a path's folder that this thread alone uses; what it becomes must have another name in the end.

    What a killed process of this machine has left in the folder under such a name goes when another first asks for one.
    """
    _sweep(str(path.parent))
    return path.with_name(f"{path.name}.tmp-{_machine()}-{os.getpid()}-{get_native_id()}")


def flush(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@cache
def _sweep(folder: str) -> None:
    """Removes temporary files and folders of processes that are gone; once in each process, for it lists the folder."""
    with suppress(OSError):
        for path in Path(folder).iterdir():
            found = _TEMPORARY.fullmatch(path.name)
            if found and found[1] == _machine() and is_process_dead(int(found[2])):
                remove(path)


def remove(path: Path) -> None:
    """Removes a file, or a folder with all that is in it, as far as it can."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def is_process_dead(pid: int) -> bool:
    """Whether no process of this machine, or of this container, has this number, or one that has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        return False
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        return state == "Z"  # its parent has not asked how it ended
    return False


def machine() -> str:
    """What tells apart the machines, their boots, and the containers on them, in which a pid means other processes."""
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
    """`gregale` in the user's cache directory, by the XDG base directory specification."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "gregale"


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock, or that held it last."""

    host: str
    pid: int
    since: float  # seconds since 1970, by its own clock

    @staticmethod
    def this_process() -> LockHolder:
        return LockHolder(socket.gethostname(), os.getpid(), time.time())

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


class LockHeld(Exception):
    """Another process holds the lock."""

    def __init__(self, holder: LockHolder | None):
        super().__init__(str(holder) if holder else "another process")
        self.holder = holder


def acquire(path: Path) -> IO[str]:
    """The lock of a file, which is made if absent; to be closed, and the system closes it when the process ends.

    A lock whose file was removed or renamed meanwhile is not the one that others see, so it is taken anew. Who looks
    whether it is held (`is_held`) has it for a moment, so that it is tried twice.
    """
    looked = False
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(file, path):
                return file
        except BlockingIOError:
            with file:
                if looked:
                    raise LockHeld(holder_of(file)) from None
            looked = True
            time.sleep(_LOOK_SECONDS)
            continue
        except BaseException:
            file.close()
            raise
        file.close()


def is_held(path: Path) -> bool:
    """Whether some process holds the lock of a file; False if there is none, or if it cannot be told."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one that has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def holder_of(file: IO[str]) -> LockHolder | None:
    """Who wrote its name into a lock; None if nobody did, or not yet in full."""
    file.seek(0)
    try:
        found = json.loads(file.read())
        return LockHolder(found["host"], found["pid"], found["since"])
    except (ValueError, TypeError, KeyError):
        return None


def write_holder(file: IO[str]) -> LockHolder:
    """Writes this process's name into a lock that it holds; a full disk is no reason not to hold it."""
    mine = LockHolder.this_process()
    with suppress(OSError):
        file.truncate(0)
        file.write(json.dumps(asdict(mine)))
        file.flush()
    return mine
