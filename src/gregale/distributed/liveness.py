"""Notice that another process of a run is lost: killed, stopped, or out of reach.

The processes wait for one another inside compiled programs. There a lost process means an endless wait, or an error of
the transport that names no process. So process 0 and every other process exchange heartbeats over a TCP connection
that stays open from the rendezvous (`gregale.distributed.rendezvous`). A process is lost when its connection closes,
or is silent for `distributed.timeout_seconds`. All others name it and end with an exit code that tells a scheduler to
start the job again. If a process ends with an error of its own, the others end shortly after with exit code 1.
Process 0 also checks that the main threads make progress (`gregale.distributed.hang_detector`). A process that hangs
ends the run.
"""

from __future__ import annotations

import atexit
import math
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread

from gregale.distributed.config import DistributedConfig
from gregale.distributed.hang_detector import Phase, Progress, ThreadProgress, find_hung
from gregale.errors import UserError
from gregale.streams import ResilientStream

EXIT_CODE = os.EX_TEMPFAIL
_BEATS = 6  # signs of life in the time after which a process is lost
_MOST_IDLE_SECONDS = 0.25  # until what this process's main thread wants is told
_WHERE_SECONDS = 5.0  # a disk that does not answer may be why the process ends


@dataclass(eq=False)
class Peer:
    """The process at the other end of a connection.

    Attributes:
        name: its number, host and pid, in words.
        heard: when it last gave a sign of life.
        is_done: whether it has come to the end of the run.
        ended: when it said that it ends with an error; None if it did not.
        place: where its main thread is.
    """

    connection: socket.socket
    name: str
    last_heartbeat: float
    is_done: bool = False
    ended: float | None = None
    place: ThreadProgress = field(default_factory=ThreadProgress)
    unread: bytes = field(default=b"", repr=False)

    def tell(self, line: str) -> None:
        """Sends a line; whether it arrives is seen elsewhere."""
        with suppress(OSError):
            self.connection.sendall(f"{line}\n".encode())

    def lines(self) -> list[str] | None:
        """What it has said, None if the connection is closed."""
        try:
            received = self.connection.recv(1 << 16)
        except OSError:
            received = b""
        *whole, self.unread = (self.unread + received).split(b"\n")
        return [line.decode(errors="replace") for line in whole] if received else None

    def line(self, most: float = math.inf) -> str | None:
        """The next line, for which this waits; what comes after it stays unread.

        None if the connection has ended, or if the line has more than `most` bytes.
        """
        while b"\n" not in self.unread:
            try:
                received = self.connection.recv(1 << 16)
            except OSError:
                received = b""
            if not received or len(self.unread) > most:
                return None
            self.unread += received
        line, self.unread = self.unread.split(b"\n", 1)
        return line.decode(errors="replace")


class LivenessMonitor(Thread):
    """Hears from the peers of a process: process 0 has all others for its peers, each of the others has process 0.

    - `progress`: where the main thread of this process is, told to the peers
    - `where`: says where the run would go on, if it is known
    """

    def __init__(self, peers: Sequence[Peer], config: DistributedConfig):
        """
        Args:
            peers: those that are connected.
            config: has this process's number, and the seconds after which one is lost or hangs.
        """
        super().__init__(daemon=True, name="peers")
        self.progress = Progress()
        self.where: Callable[[], str] = str
        self._peers, self._is_first = peers, config.process == 0
        self._timeout, self._hang_seconds = config.timeout_seconds, config.hang_seconds
        self._beat = self._timeout / _BEATS
        for peer in peers:  # nothing was said while others were waited for
            peer.last_heartbeat = time.monotonic()
        self._may_leave = self._has_failed = self._wants_verdict = False
        self._said_so, self._verdict = Event(), Event()
        self._unanswered: dict[Peer | None, set[Peer]] = {}  # for who asks whether all others live; None: this process

    def leave(self) -> None:
        """Waits until all processes have come to the end of the run."""
        self._may_leave = True
        self.join()

    def fail(self, code: int) -> None:
        """Tells the others that this process ends with an error of its own; they may be about to, too.

        JAX would wait for them when Python exits, and abort if they do not come; so this process exits without that.
        """
        self._has_failed = True
        self._said_so.wait()
        atexit.register(_exit_at_once, code)

    def confirm_peers_alive(self) -> None:
        """Waits, after an error of this process, until all others have shown that they live.

        The error may be the loss of another. That is then found out in place of an answer, and ends this process.
        """
        self._wants_verdict = True
        self._verdict.wait()

    def run(self) -> None:
        said = 0.0
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            while not self._is_over():
                for key, _ in selector.select(min(self._beat / 4, _MOST_IDLE_SECONDS)):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                if time.monotonic() - said >= self._beat:
                    said = time.monotonic()
                    for peer in self._peers:
                        peer.tell(f"alive {self.progress.place}")
                self._ask_and_answer()
                if not selector.select(0):  # a process that did not run for a while has first to hear what was said
                    self._check()

    def _ask(self, asker: Peer | None) -> None:
        """Asks all peers but the asker whether they live.

        Signs of life do not tell: those of a dead process may still lie here unread. One that has ended with an error
        of its own before it could answer is likely the reason, and `_check` ends this process in time.
        """
        self._unanswered[asker] = {peer for peer in self._peers if peer is not asker}
        for peer in self._unanswered[asker]:
            peer.tell(f"there? {asker.name if asker else ''}")

    def _ask_and_answer(self) -> None:
        """Tells all that asked at once, when all others have answered: who is told ends, and answers nobody."""
        if self._wants_verdict:
            self._wants_verdict = False
            self._ask(None)
        if self._has_failed or not all(peer.is_done for silent in self._unanswered.values() for peer in silent):
            return
        for asker in self._unanswered:
            if asker is None:
                self._verdict.set()
            else:
                asker.tell("there ")
        self._unanswered.clear()

    def _is_over(self) -> bool:
        if self._has_failed and not self._said_so.is_set():
            for peer in self._peers:
                peer.tell("failed")
            self._said_so.set()
        if not self._may_leave:
            return False
        are_all_done = all(peer.is_done for peer in self._peers)
        if are_all_done or not self._is_first:  # process 0 is the last to say so
            for peer in self._peers:
                peer.tell("done")
        return are_all_done

    def _hear(self, peer: Peer) -> bool:
        """Takes what a peer has said; returns whether it may say more."""
        lines = peer.lines()
        if lines is None:
            if peer.ended is None and not peer.is_done:
                self._end(EXIT_CODE, f"{peer.name} was lost: its connection closed.", peer)
            return False
        peer.last_heartbeat = time.monotonic()
        for line in lines:
            word, _, rest = line.partition(" ")
            if word == "end":
                code, _, text = rest.partition(" ")
                self._end(int(code), text, peer)
            if word == "alive" and (place := ThreadProgress.parse(rest)) != peer.place:
                peer.place = place
            if word == "there?" and self._is_first:
                self._ask(peer)
            elif word == "there?" and not self._has_failed:
                peer.tell(f"there {rest}")
            if word == "there":
                for asker, silent in self._unanswered.items():
                    if rest == (asker.name if asker else ""):
                        silent.discard(peer)
            peer.is_done |= word == "done"
            if word == "failed":
                peer.ended = peer.last_heartbeat
        return True

    def _check(self) -> None:
        now = time.monotonic()
        for peer in self._peers:
            if peer.ended is not None and now - peer.ended > self._timeout:
                text = f"{peer.name} ended with an error {self._timeout:g} s ago; its own output says which."
                self._end(1, text, peer)
            if peer.ended is None and not peer.is_done and now - peer.last_heartbeat > self._timeout:
                self._end(EXIT_CODE, f"{peer.name} was lost: no sign of life for {self._timeout:g} s.", peer)
        if self._is_first and self._hang_seconds is not None and all(peer.ended is None for peer in self._peers):
            self._check_hanging(now, self._hang_seconds)

    def _check_hanging(self, now: float, seconds: float) -> None:
        """Whether a main thread hangs, by what process 0 has heard from all."""
        places = {peer.name: peer.place for peer in self._peers if not peer.is_done}
        processes = {process_label(0): self.progress.place, **places}
        if (text := find_hung(processes, now, seconds)) is not None:
            bound = f"At most {seconds:g} s are given to a step, ten times that to other work"
            self._end(EXIT_CODE, f"{text} {bound} (distributed.hang_seconds).")

    def _end(self, code: int, text: str, of: Peer | None = None) -> None:
        """Ends this process, whose other threads may wait for ever, after telling the other peers why."""
        if self._has_failed:  # it ends anyway, and has its own reason
            return
        others = [peer for peer in self._peers if peer is not of]
        for peer in others:
            peer.tell(f"end {code} {text}")
        log_line(f"error: {text} {self._where_in_time()}".rstrip())
        for peer in others:  # a connection that closes with something unread in it would take the message back
            with suppress(OSError):
                peer.connection.settimeout(1.0)
                while peer.connection.recv(1 << 16):
                    pass
        os._exit(code)

    def _where_in_time(self) -> str:
        """Where the run would go on; nothing if the disk does not tell."""
        told: list[str] = []
        asking = Thread(target=lambda: told.append(self.where()), daemon=True)
        asking.start()
        asking.join(_WHERE_SECONDS)
        return told[0] if told else ""


@contextmanager
def monitor_peers(watch: LivenessMonitor | None, where: Callable[[], str]) -> Iterator[Progress]:
    """Ends this process if another one of the run is lost or hangs while the block runs.

    All processes leave the block together, unless by an exception. The block tells where it is.

    - `watch`: of the other processes, as `start_devices` returns it; None: there are no others
    - `where`: says where the run would go on, in a sentence
    """
    if watch is None:
        yield Progress()
        return
    watch.where = where
    try:
        yield watch.progress
    except (UserError, KeyboardInterrupt) as error:
        watch.fail(error.exit_code if isinstance(error, UserError) else 130)
        raise
    except BaseException:
        watch.confirm_peers_alive()
        watch.fail(1)
        raise
    watch.progress.at(watch.progress.place.steps, Phase.ENDING)
    watch.leave()


def process_label(number: int) -> str:
    """This process in words."""
    return f"process {number} ({socket.gethostname()}, pid {os.getpid()})"


def log_line(text: str) -> None:
    """A line on standard error, whatever other threads do."""
    with suppress(OSError):
        os.write(2, f"gregale: {text}\n".encode())


def _exit_at_once(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        ResilientStream(stream).flush()
    os._exit(code)
