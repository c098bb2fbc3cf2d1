"""Files that are whole or not there, locks that end with their process, and what the system says of a failure.

Worker processes import this module: it imports nothing but the standard library.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

# What a full, protected or broken disk says: for the user to mend, and not a mistake of this program.
OF_THE_DISK = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE),
    *(errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.EMFILE),
}
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}  # of a file system that has none


_LOOK_SECONDS = 0.05


def reason(error: BaseException) -> str:
    """Why something could not be read or written, in the system's few words and with the file if it is known."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    text = " ".join(str(error).split()) or type(error).__name__
    known = (os.strerror(number) for number in OF_THE_DISK)
    return next((words for words in known if words in text), text[:200])


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all; what a failure leaves half-written is removed."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def user_cache() -> Path:
    """`gregale` in the user's cache directory, by the XDG base directory specification."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "gregale"


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, or that held it last."""

    host: str
    pid: int
    since: float  # seconds since 1970, by its own clock

    @staticmethod
    def this_process() -> Holder:
        return Holder(socket.gethostname(), os.getpid(), time.time())

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


class Taken(Exception):
    """Another process holds the lock."""

    def __init__(self, holder: Holder | None):
        super().__init__(str(holder) if holder else "another process")
        self.holder = holder


def acquire(path: Path, wait: bool = False) -> IO[str]:
    """The lock of a file, which is made if absent; to be closed, and the system closes it when the process ends.

    - `wait`: until it is free, instead of raising `Taken`

    A lock whose file was removed or renamed meanwhile is not the one that others see, so it is taken anew. Who looks
    whether it is held (`is_held`) has it for a moment, so that it is tried twice.
    """
    looked = False
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if is_at(file, path):
                return file
        except BlockingIOError:
            with file:
                if looked:
                    raise Taken(holder_of(file)) from None
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


def holder_of(file: IO[str]) -> Holder | None:
    """Who wrote its name into a lock; None if nobody did, or not yet in full."""
    file.seek(0)
    try:
        return Holder(**json.loads(file.read()))
    except (ValueError, TypeError):
        return None


def sign(file: IO[str]) -> None:
    """Writes this process's name into a lock that it holds; a full disk is no reason not to hold it."""
    with suppress(OSError):
        file.truncate(0)
        file.write(json.dumps(asdict(Holder.this_process())))
        file.flush()
