"""The revocations that a process knows, each with the authority's signature.

A revocation is an entry `NAME/ID` with the number 1 and a random ID. A key has the IDs of all revocations of its name
that its maker knew. **A process accepts a key only if the key has each revocation of its name that the process knows.**
So a revocation ends all keys that were made before it, whatever its maker knew: no earlier key can have its ID. No
clock and no order of revocations matters. A key whose maker did not know a revocation is refused too.

An entry `NAME` has the number of revocations that an earlier version of Gregale has made; a key has this number too.

Each entry proves itself, and of two the larger number holds. So a list may be copied, sent and merged in any order, and
no old list brings a key back. The list is in a file beside the token or the key. Each process reads it again when it
changes. The coordinator sends it to the islands, and an island keeps it beside its key.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from gregale.atomic_files import NO_LOCKS, write_bytes
from gregale.distributed.agreement import canonical
from gregale.errors import UserError
from gregale.storage import digest

Entry = tuple[int, str]


def list_beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.revoked")


def lock_of(path: Path) -> Path:
    """Return the path of the file that a process locks while it writes a list."""
    return path.with_name(f"{path.name}.lock")


def new_entry(name: str) -> str:
    return f"{name}/{secrets.token_hex(8)}"


class Revocations:
    """The list of one process.

    - `is_signed(entry, count, signature)`: whether the authority has signed an entry
    - `version`: increases with each change
    """

    def __init__(self, is_signed: Callable[[str, int, str], bool]):
        self.version = 0
        self._is_signed, self._lock = is_signed, Lock()
        self._entries: dict[str, Entry] = {}
        self._path: Path | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._is_lacking = False  # the file lacked entries when it was read

    def of(self, name: str) -> dict[str, int]:
        """Return the number of each entry of a name, by its ID; "" for the entry without one."""
        found = ((entry.partition("/"), count) for entry, (count, _) in self._entries.items())
        return {number: count for (each, _, number), count in found if each == name}

    def digest(self) -> str:
        return digest(canonical(self._entries))

    def to_json(self) -> dict[str, Any]:
        return {key: list(entry) for key, entry in self._entries.items()}

    def follow(self, path: Path) -> None:
        """Read the list in a file, and again with each `reload`. Raises UserError if it is damaged."""
        self._path = path
        if complaint := self.reload():
            raise UserError(complaint)

    def reload(self) -> str:
        """Read the file again if it has changed; return a complaint if that fails.

        If it lacks entries that are known, as a list from elsewhere was copied over it, they are added to it.
        """
        complaint = self._read()
        if self._is_lacking:
            self._is_lacking = False
            with suppress(OSError, UserError), self.rewriting(durable=False):
                pass
        return complaint

    def _read(self) -> str:
        if self._path is None:
            return ""
        try:
            status = os.stat(self._path)
            stamp = status.st_mtime_ns, status.st_size, status.st_ino
            if stamp != self._stamp:
                self.merge(found := json.loads(self._path.read_bytes()))
                self._is_lacking = found != self.to_json()
                self._stamp = stamp  # only now: what fails is tried again
        except FileNotFoundError:  # nothing is revoked; what is known stays so
            return ""
        except (OSError, ValueError, TypeError, AttributeError):
            return (
                f"{self._path} is no list of revocations of this fleet, or cannot be read. Copy it again from where "
                "`gregale islands revoke` has written it; without it revoked keys would be accepted."
            )
        return ""

    def take(self, entries: Any) -> None:
        """Take the entries that the coordinator sends, and keep them in the file if it can be read and written."""
        with suppress(ValueError, TypeError, AttributeError, OSError):
            if self.merge(entries) and self._path is not None:
                with self.rewriting(durable=False):  # a heartbeat does not wait for the disk
                    pass

    @contextmanager
    def rewriting(self, durable: bool = True) -> Iterator[None]:
        """Hold the lock of the file: read it again, and write it after the block, so that no process's entry is lost.

        Raises UserError if the file is damaged, and OSError.
        """
        assert self._path is not None
        # Only the owner may open it, as others could hold the lock.
        with open(lock_of(self._path), "ab", opener=partial(os.open, mode=0o600)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            if complaint := self._read():
                raise UserError(complaint)
            yield
            write_bytes(self._path, canonical(self.to_json()), durable)

    def merge(self, entries: Any) -> bool:
        """Add the entries that are new; return whether there are any. Raises ValueError for one that is not signed."""
        with self._lock:
            known = self._entries
            new = {key: (count, text) for key, (count, text) in entries.items() if count > known.get(key, (0, ""))[0]}
            if not all(self._is_signed(key, *entry) for key, entry in new.items()):
                raise ValueError
            self._entries = dict(sorted({**known, **new}.items()))
            self.version += bool(new)
            return bool(new)
