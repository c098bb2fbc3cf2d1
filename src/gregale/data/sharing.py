"""Several builders, in processes of one host or of many, share the parts of one store.

Each keeps a note of itself beside the parts, in `builders/`: who it is, which parts it has taken, which it has finished
lately, and a count that it raises every few seconds. A part is taken by writing it into one's note and then reading
the others': of two that took the same at once, one yields. A builder is lost when its process is gone from this host,
or when its count has stood still for `LOST_SECONDS` by the clock of whoever looks; its parts are then free again. So no
lock is needed, which many network disks and no object store have; and no clocks are compared.

Nothing depends on it but the time: two builders that encode the same part, after a pause or a race, write the same
bytes, each as a whole.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from threading import Event, Lock, Thread

from gregale.errors import UserError
from gregale.files import is_gone, machine
from gregale.storage import Place, files_below, write_bytes

BEAT_SECONDS = 5.0
LOST_SECONDS = 30.0
READING_THREADS = 16
LATELY = 1000  # parts that a note names as finished; whoever misses one looks for its seal


@dataclass(frozen=True)
class Note:
    """What a builder says of itself.

    Attributes:
        builder: its name, like no other's.
        host: for the eye.
        space: in which its `pid` means something: the same boot of the same machine or container.
        pid: of its process.
        beat: how often it has given a sign of life.
        holds: the parts that it is at work on.
        finished: the parts that it has sealed, the last of them.
        done_bytes: how much input it has encoded.
        reads: it reads the parts, also when the store is complete.
    """

    builder: str
    host: str
    space: str
    pid: int
    beat: int = 0
    holds: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    done_bytes: int = 0
    reads: bool = False


class Crew:
    """This process among those that build a store; use it in a `with` statement.

    Args:
        folder: where the store's parts lie.
        beat_seconds: between two signs of life.
        lost_seconds: without one, a builder is lost.
        reads: see `Note`.
    """

    def __init__(
        self,
        folder: Place,
        beat_seconds: float = BEAT_SECONDS,
        lost_seconds: float = LOST_SECONDS,
        reads: bool = False,
    ):
        self._folder = folder / "builders"
        self._note = Note(secrets.token_hex(8), socket.gethostname(), machine(), os.getpid(), reads=reads)
        self._beat_seconds, self._lost_seconds = beat_seconds, lost_seconds
        self._others: list[Note] = []
        self._seen: dict[str, tuple[int, float]] = {}
        self._lock, self._left = Lock(), Event()
        self._thread = Thread(target=self._beat, daemon=True, name="builder")

    @property
    def place(self) -> Place:
        """Where this builder's note lies."""
        return self._folder / f"{self._note.builder}.json"

    def __enter__(self) -> "Crew":
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()
        with suppress(OSError, UserError):
            self.place.unlink(missing_ok=True)

    def claim(self, parts: Iterable[int], count: int) -> list[int]:
        """Takes up to `count` of the parts, the first that nobody had when it last looked, and has now."""
        taken = {part for note in self._others for part in note.holds} | set(self._note.holds)
        chosen = list(islice((part for part in parts if part not in taken), count))
        if not chosen:
            return []
        self._write(holds=(*self._note.holds, *chosen))
        # Of two that did so at once, each sees the other: the second look comes after both have written.
        earlier = {part for note in self.look() if note.builder < self._note.builder for part in note.holds}
        if lost := earlier & set(chosen):
            self._write(holds=tuple(part for part in self._note.holds if part not in lost))
        return [part for part in chosen if part not in lost]

    def release(self, part: int, size_bytes: int | None) -> None:
        """Gives a part back; with a size, it is finished, and had so much input."""
        with self._lock:  # what is claimed next is written with it, or the next sign of life
            note = replace(self._note, holds=tuple(each for each in self._note.holds if each != part))
            if size_bytes is not None:
                note = replace(note, finished=(*note.finished, part)[-LATELY:], done_bytes=note.done_bytes + size_bytes)
            self._note = note

    def look(self) -> list[Note]:
        """Reads the notes of all other builders that are at work."""
        names = [name for name in files_below(self._folder) if name != self.place.name]
        with ThreadPoolExecutor(READING_THREADS) as pool:
            notes = [note for note in pool.map(self._read, names) if note is not None]
        self._others = [note for note in notes if not self._is_lost(note)]
        return self._others

    def neighbours(self) -> int:
        """How many other builders were at work on this machine when it last looked."""
        return sum(note.space == self._note.space for note in self._others)

    def name_of(self, note: Note) -> str:
        """`host`, or `process 123` where that is this one."""
        return f"process {note.pid}" if note.host == self._note.host else note.host

    def is_parent(self, note: Note) -> bool:
        """Whether a note is that of the process that started this one."""
        return note.space == self._note.space and note.pid == os.getppid()

    def _is_lost(self, note: Note) -> bool:
        beat, since = self._seen.get(note.builder, (-1, 0.0))
        now = time.monotonic()
        if note.beat != beat:
            self._seen[note.builder] = (note.beat, now)
            since = now
        if not (note.space == self._note.space and is_gone(note.pid)) and now - since <= self._lost_seconds:
            return False
        with suppress(OSError, UserError):
            (self._folder / f"{note.builder}.json").unlink(missing_ok=True)  # if it lives, its next beat writes it
        return True

    def _read(self, name: str) -> Note | None:
        with suppress(FileNotFoundError, ValueError, TypeError, AttributeError):
            saved = json.loads((self._folder / name).read_bytes())
            return Note(**saved | {"holds": tuple(saved["holds"]), "finished": tuple(saved["finished"])})
        return None

    def _write(self, **changes) -> None:
        with self._lock:
            self._note = replace(self._note, **changes)
            write_bytes(self.place, json.dumps(asdict(self._note)).encode())

    def _beat(self) -> None:
        while not self._left.wait(self._beat_seconds):
            with suppress(OSError, UserError):  # a store that is out of order: the others take over what this one has
                self._write(beat=self._note.beat + 1)
