"""Processes watch each other: a dead peer or a hang ends the run.

A dead or stopped process sends no heartbeats. A process whose main thread hangs (a disk that does not respond, a
deadlock, a device that never finishes) still sends them, from another thread. So each heartbeat contains the progress
of the main thread, and process 0 compares them. A process hangs if it is behind all others without progress for
`distributed.hang_seconds`. The training loop records its progress:

    progress.at(step, Phase.TRAINING)
    with progress.waiting():  # for the devices, and so perhaps for other processes
        jax.device_get(report)

A process that prepares its data or restores a checkpoint has no time limit.

The processes wait for one another inside compiled programs. There a lost process means an endless wait, or an error of
the transport that names no process. So process 0 and every other process exchange heartbeats over a TCP connection
that stays open from the rendezvous (`gregale.distributed.rendezvous`). A process is lost when its connection closes,
or is silent for `distributed.timeout_seconds`. All others name it and end with an exit code that tells a scheduler to
start the job again. If a process ends with an error of its own, the others end shortly after with exit code 1.
Process 0 also checks that the main threads make progress. A process that hangs ends the run.
"""

import atexit
import math
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from threading import Event, Thread

import jax

from gregale.distributed.config import DistributedConfig
from gregale.distributed.signals import CHECK_EVERY, ProcessFlags
from gregale.errors import Interrupted, UserError
from gregale.formatting import listed
from gregale.streams import exit_at_once

OTHER_WORK = 10  # timeout of other phases (compiling, evaluating, saving) in units of the timeout of a step


class Phase(StrEnum):
    """The current work of a main thread."""

    PREPARING = "preparing"  # before the first step: no time limit
    COMPILING = "compiling"  # until the first step of a program is done
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    SYNCHRONISING = "synchronising"  # waiting for other runs of a fleet: no time limit
    ENDING = "ending"  # no other process waits for this process any more

    def timeout(self, seconds: float) -> float:
        """Return the maximum seconds without progress in this phase; `seconds`: the timeout of a step."""
        if self in (Phase.PREPARING, Phase.SYNCHRONISING, Phase.ENDING):
            return math.inf
        return seconds if self is Phase.TRAINING else OTHER_WORK * seconds


@dataclass(frozen=True)
class ThreadProgress:
    steps: int = 0  # done or begun
    phase: Phase = Phase.PREPARING
    waits: bool = False  # whether the thread waits for its devices
    marks: int = 0  # number of progress updates
    since: float = field(default_factory=time.monotonic, compare=False)  # time at which this process received it

    def __str__(self) -> str:
        return f"{self.steps} {self.phase} {self.waits:d} {self.marks}"

    @classmethod
    def parse(cls, text: str) -> "ThreadProgress":
        steps, phase, waits, marks = text.split()
        return cls(int(steps), Phase(phase), waits == "1", int(marks))

    def is_late(self, now: float, seconds: float) -> bool:
        """Return whether the thread has made no progress for longer than `Phase.timeout`."""
        return now - self.since > self.phase.timeout(seconds)


class Progress:
    """The progress of this process's main thread, which writes it; the heartbeat thread reads it."""

    def __init__(self) -> None:
        self.current = ThreadProgress()

    def at(self, steps: int, phase: Phase) -> None:
        """Record that the main thread enters a phase."""
        self.current = ThreadProgress(steps, phase, False, self.current.marks + 1)

    def still(self) -> None:
        """Record progress within the current phase."""
        self._update(self.current.waits)

    @contextmanager
    def waiting(self, phase: Phase | None = None) -> Iterator[None]:
        """Record that the main thread waits inside the block: for devices, or as `phase` says."""
        before = self.current.phase
        self.current = replace(self.current, phase=phase or before, waits=True, since=time.monotonic())
        yield
        self.current = replace(self.current, phase=before if phase else self.current.phase)
        self._update(False)

    def _update(self, waits: bool) -> None:
        self.current = replace(self.current, waits=waits, marks=self.current.marks + 1, since=time.monotonic())


def find_hung(processes: Mapping[str, ThreadProgress], now: float, seconds: float) -> str | None:
    """Return a sentence that names the hanging processes; None if none hangs.

    A process that waits for its devices may wait for the devices of another process. Of the processes that do not
    wait, those with the fewest steps block all others. If all wait, the devices of those with the fewest steps hang.

    - `processes`: the progress of each process, by its name
    - `seconds`: `distributed.hang_seconds`
    """
    running = {name: each for name, each in processes.items() if each.phase is not Phase.ENDING}
    suspects = {name: each for name, each in running.items() if not each.waits} or running
    fewest = min((each.steps for each in suspects.values()), default=0)
    behind = {name: each for name, each in suspects.items() if each.steps == fewest}
    if not behind or not all(each.is_late(now, seconds) for each in behind.values()):
        return None
    waits = any(each.waits for each in behind.values())
    if waits and not all(each.is_late(now, seconds) for each in running.values()):
        return None
    return _sentence(behind, len(running), now)


def _sentence(behind: Mapping[str, ThreadProgress], running: int, now: float) -> str:
    first, stood = next(iter(behind.values())), now - max(each.since for each in behind.values())
    at = f"for {stood:.0f} s {first.phase} after {first.steps} steps"
    if first.phase in (Phase.TRAINING, Phase.COMPILING):
        at = f"for {stood:.0f} s in step {first.steps}"
        at += ", which it compiles" if first.phase is Phase.COMPILING else ""
    if len(behind) == running > 1:
        waits = ", waiting for their devices" if first.waits else ""
        return f"All {len(behind)} processes hang: they have been {at}{waits}."
    names = listed([*behind], 3)
    devices = ", waiting for devices" if first.waits else ""
    return f"{names} {'hangs: it has' if len(behind) == 1 else 'hang: they have'} been {at}{devices}."


EXIT_CODE = os.EX_TEMPFAIL
_HEARTBEATS = 6  # heartbeats within the timeout of a process
_MAX_IDLE_SECONDS = 0.25  # maximum delay before a request of the main thread is sent
_RESUME_HINT_SECONDS = 5.0  # timeout: a disk that does not respond may be why the process ends


@dataclass(eq=False)
class Peer:
    """The process at the other end of a connection."""

    connection: socket.socket
    name: str  # text with its number, host and process id
    last_heartbeat: float  # time of its last message
    is_done: bool = False  # whether it has reached the end of the run
    ended: float | None = None  # time at which it announced an error of its own; None before
    progress: ThreadProgress = field(default_factory=ThreadProgress)  # the progress of its main thread
    unread: bytes = field(default=b"", repr=False)

    def send(self, line: str) -> None:
        """Send a line; ignore errors, because reads detect a closed connection."""
        with suppress(OSError):
            self.connection.sendall(f"{line}\n".encode())

    def received_lines(self) -> list[str] | None:
        """Receive once and return the complete lines; None if the connection is closed."""
        if not self._receive():
            return None
        *complete, self.unread = self.unread.split(b"\n")
        return [line.decode(errors="replace") for line in complete]

    def next_line(self, max_bytes: float = math.inf) -> str | None:
        """Wait for the next line; None if the connection ended or the line exceeds `max_bytes`. Later bytes stay."""
        while b"\n" not in self.unread:
            if len(self.unread) > max_bytes or not self._receive():
                return None
        line, self.unread = self.unread.split(b"\n", 1)
        return line.decode(errors="replace")

    def _receive(self) -> bool:
        received = b""
        with suppress(OSError):
            received = self.connection.recv(1 << 16)
        self.unread += received
        return bool(received)


class LivenessMonitor(Thread):
    """A thread that exchanges heartbeats with peers: process 0 with all others, each other process with process 0.

    - `progress`: the progress of this process's main thread, sent to the peers
    - `resume_hint`: returns a sentence about the step from which the run resumes, if it is known
    """

    def __init__(self, peers: Sequence[Peer], config: DistributedConfig):
        super().__init__(daemon=True, name="peers")
        self.progress = Progress()
        self.resume_hint: Callable[[], str] = str
        self._peers, self._is_first = peers, config.process == 0
        self._timeout, self._hang_seconds = config.timeout_seconds, config.hang_seconds
        self._interval = self._timeout / _HEARTBEATS
        for peer in peers:  # they sent nothing during the rendezvous
            peer.last_heartbeat = time.monotonic()
        self._may_leave = self._has_failed = self._wants_confirmation = False
        self._failure_sent, self._peers_confirmed = Event(), Event()
        self._unanswered: dict[Peer | None, set[Peer]] = {}  # asking process (None: this process) -> silent peers

    def leave(self) -> None:
        """Wait until all processes have reached the end of the run."""
        self._may_leave = True
        self.join()

    def fail(self, code: int) -> None:
        """Announce to the others that this process ends with an error of its own; they may have the same error.

        At Python's exit JAX would wait for the others and abort if they do not join. So this process skips that.
        """
        self._has_failed = True
        self._failure_sent.wait()
        atexit.register(exit_at_once, code)

    def confirm_peers_alive(self) -> None:
        """Wait, after an error of this process, until all others have replied.

        The cause of the error may be the loss of another process. The monitor then finds the loss and ends this
        process.
        """
        self._wants_confirmation = True
        self._peers_confirmed.wait()

    def run(self) -> None:
        last_sent = 0.0
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            while not self._is_over():
                for key, _ in selector.select(min(self._interval / 4, _MAX_IDLE_SECONDS)):
                    if not self._receive(key.data):
                        selector.unregister(key.fileobj)
                if time.monotonic() - last_sent >= self._interval:
                    last_sent = time.monotonic()
                    for peer in self._peers:
                        peer.send(f"alive {self.progress.current}")
                self._confirm()
                if not selector.select(0):  # a process that was suspended must first read the waiting messages
                    self._check()

    def _ask_peers(self, asker: Peer | None) -> None:
        """Ask all peers except the asker for a reply.

        Heartbeats are no proof: unread heartbeats of a dead process may still be in the buffer. A peer that ended with
        an error of its own before it replied is likely the cause; `_check` then ends this process after the timeout.
        """
        self._unanswered[asker] = {peer for peer in self._peers if peer is not asker}
        for peer in self._unanswered[asker]:
            peer.send(f"there? {asker.name if asker else ''}")

    def _confirm(self) -> None:
        """Confirm to all askers at once when all peers have replied: a confirmed process ends and replies no more."""
        if self._wants_confirmation:
            self._wants_confirmation = False
            self._ask_peers(None)
        if self._has_failed or not all(peer.is_done for silent in self._unanswered.values() for peer in silent):
            return
        for asker in self._unanswered:
            if asker is None:
                self._peers_confirmed.set()
            else:
                asker.send("there ")
        self._unanswered.clear()

    def _is_over(self) -> bool:
        if self._has_failed and not self._failure_sent.is_set():
            for peer in self._peers:
                peer.send("failed")
            self._failure_sent.set()
        if not self._may_leave:
            return False
        are_all_done = all(peer.is_done for peer in self._peers)
        if are_all_done or not self._is_first:  # process 0 is the last to send it
            for peer in self._peers:
                peer.send("done")
        return are_all_done

    def _receive(self, peer: Peer) -> bool:
        """Process the lines of a peer; return whether the connection is still open."""
        lines = peer.received_lines()
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
            if word == "alive" and (progress := ThreadProgress.parse(rest)) != peer.progress:
                peer.progress = progress
            if word == "there?" and self._is_first:
                self._ask_peers(peer)
            elif word == "there?" and not self._has_failed:
                peer.send(f"there {rest}")
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
                text = f"{peer.name} ended with an error {self._timeout:g} s ago; see its own output."
                self._end(1, text, peer)
            if peer.ended is None and not peer.is_done and now - peer.last_heartbeat > self._timeout:
                self._end(EXIT_CODE, f"{peer.name} was lost: no heartbeat for {self._timeout:g} s.", peer)
        if self._is_first and self._hang_seconds is not None and all(peer.ended is None for peer in self._peers):
            self._check_for_hang(now, self._hang_seconds)

    def _check_for_hang(self, now: float, seconds: float) -> None:
        """End the run if a main thread hangs, by the progress that process 0 has received."""
        peers = {peer.name: peer.progress for peer in self._peers if not peer.is_done}
        processes = {process_label(0): self.progress.current, **peers}
        if (text := find_hung(processes, now, seconds)) is not None:
            limit = f"Limit: {seconds:g} s per step, ten times that for other work"
            self._end(EXIT_CODE, f"{text} {limit} (distributed.hang_seconds).")

    def _end(self, code: int, text: str, of: Peer | None = None) -> None:
        """Send the reason to the other peers, then end this process, whose other threads may wait for ever."""
        if self._has_failed:  # it ends anyway, with an error of its own
            return
        others = [peer for peer in self._peers if peer is not of]
        for peer in others:
            peer.send(f"end {code} {text}")
        log_line(f"error: {text} {self._resume_hint_in_time()}".rstrip())
        for peer in others:  # closing a connection with unread data would discard the message
            with suppress(OSError):
                peer.connection.settimeout(1.0)
                while peer.connection.recv(1 << 16):
                    pass
        os._exit(code)

    def _resume_hint_in_time(self) -> str:
        """Return the resume hint; "" if the disk does not respond in time."""
        hints: list[str] = []
        reader = Thread(target=lambda: hints.append(self.resume_hint()), daemon=True)
        reader.start()
        reader.join(_RESUME_HINT_SECONDS)
        return hints[0] if hints else ""


@contextmanager
def monitor_peers(monitor: LivenessMonitor | None, resume_hint: Callable[[], str]) -> Iterator[Progress]:
    """End this process if another process of the run is lost or hangs while the block runs.

    Yields the `Progress` that the block updates. Without an exception, all processes leave the block together.

    - `monitor`: the result of `start_devices`; None if there are no other processes
    - `resume_hint`: returns a sentence about the step from which the run resumes
    """
    if monitor is None:
        yield Progress()
        return
    monitor.resume_hint = resume_hint
    try:
        yield monitor.progress
    except Interrupted as error:  # the others report this process as lost
        atexit.register(exit_at_once, *error.args)
        raise
    except (UserError, KeyboardInterrupt) as error:
        monitor.fail(error.exit_code if isinstance(error, UserError) else 130)
        raise
    except BaseException:
        monitor.confirm_peers_alive()
        monitor.fail(1)
        raise
    monitor.progress.at(monitor.progress.current.steps, Phase.ENDING)
    monitor.leave()


def process_label(number: int) -> str:
    """Return the number of this process with its host and process id."""
    return f"process {number} ({socket.gethostname()}, pid {os.getpid()})"


def log_line(text: str) -> None:
    """Write a line to standard error in one system call, so that other threads cannot split it."""
    with suppress(OSError):
        os.write(2, f"gregale: {text}\n".encode())


class Elapsed:
    """A turn once in `seconds` by the clock of process 0.

    In a run of several processes a turn comes up to twice `check_every` steps late, see `StopRequest`.

    - `clock`: the time in seconds
    - `begin`: the time from which turns are counted; None: now
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        begin: float | None = None,
        check_every: int = CHECK_EVERY,
    ):
        self._seconds, self._clock, self._check_every = seconds, clock, check_every
        self._begin = clock() if begin is None else begin
        self._processes = ProcessFlags() if jax.process_count() > 1 else None
        self._last = self._turn(0.0)

    def is_due(self, step: int, offset: float = 0.0) -> bool:
        """Return whether it is a turn, and take it; every process calls this after every step, with equal results.

        - `offset`: in [0, 1): turns are at `offset`, 1 + `offset`, ... times `seconds`
        """
        if self._processes is None:
            return self._taken(offset)
        if step % self._check_every:
            return False
        return self._processes.exchanged(jax.process_index() == 0 and self._taken(offset))

    def _taken(self, offset: float) -> bool:
        turn, last = self._turn(offset), self._last
        self._last = max(turn, last)
        return turn > last

    def _turn(self, offset: float) -> int:
        return math.floor((self._clock() - self._begin) / self._seconds - offset)
