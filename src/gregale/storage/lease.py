"""A lease: a file or an object that names its holder and has a counter, which the holder increases every few seconds.

Other processes compare no clocks. A lease whose content does not change for some time has expired; so has one whose
holder was a process of this machine that has ended. The users decide how long to wait, and when to take its place.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import IO
from uuid import uuid4

from gregale.atomic_files import LockHolder, is_process_dead, machine
from gregale.errors import UserError
from gregale.storage.stores import StoragePath, StoreError


@dataclass(frozen=True)
class LeaseRecord(LockHolder):
    """The content of the file or the object."""

    machine: str  # identifies the machine, because two hosts may have the same name
    token: str
    count: int = 0

    @staticmethod
    def of_this_process() -> "LeaseRecord":
        return LeaseRecord(**asdict(LockHolder.this_process()), machine=machine(), token=uuid4().hex)

    @staticmethod
    def parse(content: bytes) -> "LeaseRecord | None":
        try:
            fields = json.loads(content)
            if "beat" in fields:  # a claim of an earlier version
                fields = {"host": "", "since": 0.0, "count": fields.pop("beat"), **fields}
            return LeaseRecord(**fields)
        except (ValueError, TypeError):
            return None

    @staticmethod
    def read(path: StoragePath) -> "LeaseRecord | None":
        """Read a lease; return None if it is absent or damaged."""
        try:
            return LeaseRecord.parse(path.read_bytes())
        except FileNotFoundError:
            return None

    def write(self, path: StoragePath) -> None:
        if not isinstance(path, Path):
            path.write_bytes(self.to_bytes())
            return
        with path.open("r+b", buffering=0) as file:  # keeps the locked file, and works on a full disk
            file.write(self.to_bytes())
            file.truncate()

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def is_abandoned(self) -> bool:
        """Whether the holder was a process of this machine, and no process has its id now."""
        return self.machine == machine() and is_process_dead(self.pid)


class HeldLease:
    """The lease `name`, which this process holds until it loses it; `locked`: the lock file on a disk with locks."""

    def __init__(self, path: StoragePath, lease: LeaseRecord, name: str = "lease", locked: IO[str] | None = None):
        self._path, self._lease, self._name, self._locked = path, lease, name, locked
        self._lost_to: LeaseRecord | None = None

    def check(self) -> None:
        """Read the lease; raise `UserError` if this process has lost it."""
        found = LeaseRecord.read(self._path)
        if found is None and self._locked is not None:  # another process may have taken it, ended and removed it
            found = LeaseRecord.parse(os.pread(self._locked.fileno(), 4096, 0))
        if found is not None and found.token != self._lease.token:
            self._lost_to = found
        if self._lost_to is not None:
            raise UserError(f"{self._path.parent}: this process lost the {self._name} to {self._lost_to}")

    def renew(self) -> None:
        """Increase the counter of the lease. Raises as `check`."""
        self.check()
        self._lease = replace(self._lease, count=self._lease.count + 1)
        self._lease.write(self._path)

    def release(self) -> None:
        """Delete the lease if this process still holds it."""
        found = LeaseRecord.read(self._path)
        if found is not None and found.token == self._lease.token:
            self._path.unlink(missing_ok=True)

    @contextmanager
    def renewing(self, seconds: float, on_loss: Callable[[UserError], None] = lambda error: None) -> Iterator[None]:
        """Renew the lease in a thread while the block runs, until its loss (`on_loss`); release it at the end."""
        ended = Event()

        def renew() -> None:
            while not ended.wait(seconds):
                try:
                    self.renew()
                except (StoreError, OSError):
                    continue  # the storage fails, so no other process can take the lease either
                except UserError as error:
                    return on_loss(error)

        thread = Thread(target=renew, daemon=True, name=self._name)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(seconds)
            with suppress(StoreError, OSError):  # after a failure the next process waits until the lease expires
                self.release()
