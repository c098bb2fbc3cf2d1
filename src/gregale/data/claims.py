"""Claims: one of several processes, on any hosts with a common disk or store, does some work; the others wait.

The process that creates the claim, a small file, does the work and rewrites the claim every few seconds. If the claim
does not change for `LOST_SECONDS`, or its process has exited on this machine, another process removes the claim and
continues. This needs no locks, which object stores and many network disks lack, and compares no clocks.

Only time depends on the claim: two processes that do the same work after a pause or a race write the same bytes.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from gregale.atomic_files import is_process_dead, machine
from gregale.data.encoder_pool import UNGUARDED
from gregale.errors import UserError
from gregale.storage import StoragePath, create, write_bytes

BEAT_SECONDS = 5.0
LOST_SECONDS = 30.0
POLL_SECONDS = 0.5


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
    seen, since = None, time.monotonic()
    mine = {"machine": machine(), "pid": os.getpid(), "token": secrets.token_hex(8), "beat": 0}
    while not is_done():
        found = read(claim)
        if not found and create(claim, json.dumps(mine).encode()):
            with beating(claim, mine):
                return work()
        is_here = found.get("machine") == mine["machine"]
        if is_here and found["pid"] == os.getppid():
            raise UserError(f"{claim}: the parent process is at work. {UNGUARDED}")
        is_dead = is_here and is_process_dead(found["pid"])
        if is_dead or (found == seen and time.monotonic() - since > LOST_SECONDS):
            claim.unlink(missing_ok=True)
            continue
        if found != seen:
            seen, since = found, time.monotonic()
        waiting()
        time.sleep(POLL_SECONDS)


def read(claim: StoragePath) -> dict:
    with suppress(FileNotFoundError, ValueError):
        return json.loads(claim.read_bytes())
    return {}


@contextmanager
def beating(claim: StoragePath, mine: dict) -> Iterator[None]:
    """Rewrite a claim every few seconds while the block runs; remove it at the end."""
    ended = Event()

    def beat() -> None:
        count = 0
        while not ended.wait(BEAT_SECONDS):
            count += 1
            with suppress(OSError, UserError):  # if the store fails, another process may take over
                write_bytes(claim, json.dumps(mine | {"beat": count}).encode())

    thread = Thread(target=beat, daemon=True, name="claim")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(OSError, UserError):
            claim.unlink(missing_ok=True)
