"""Stop requests: SIGTERM, SIGINT, SIGHUP and callbacks end a run after a checkpoint, in all processes at one step."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import Thread, Timer, current_thread, local, main_thread
from types import FrameType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gregale.errors import Interrupted
from gregale.streams import say_beside

CHECK_EVERY = 10
CHECK_BATCHES = 4
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Cut(BaseException):
    """An evaluation or a callback is left unfinished because a signal ends the run. `except Exception` passes it."""


class StopRequest:
    """Catches SIGTERM, SIGINT and SIGHUP inside a `with` block.

    SIGHUP, which a closed terminal sends, stays ignored if it is ignored (`nohup`). If there is something to save, the
    first signal only sets `signal_name`, and a second SIGINT raises KeyboardInterrupt, for a user who cannot wait for
    the checkpoint. If there is nothing, the first signal raises `Interrupted`. The end of the block restores the old
    handlers. In a thread that is not the main one it catches nothing, because Python calls handlers in the main thread
    only, and there between two instructions. So another thread reports each signal at once, and ends the process if the
    main thread is too long in a compiler, or waits for a device.

    In a run of several processes a signal reaches them at different steps, or reaches only some of them. So all act on
    `agreed` and `check` only.

    - `reason`: the reason that a callback of this process gave to end the run; None if none has
    - `is_cut`: whether `check` has raised `Cut`, in every process
    - `unsaved`: whether there is something to save, such as a step that no checkpoint has
    - `report`: takes a line about a signal, in another thread
    - `check_every`: steps between two exchanges among processes, more than the device has in flight; the processes
      agree on a stop at most twice as many steps after the signal
    - `exit_seconds`: a process that is to end at once, as after the second SIGINT, ends within this time, even if it
      waits for a store
    - `signals`: those to catch
    """

    ends_process: ClassVar[bool] = True  # after the second SIGINT, see `process_goes_on`
    active: ClassVar[list["StopRequest"]] = []  # those that catch signals in this process, the innermost last

    def __init__(self, check_every: int = CHECK_EVERY, exit_seconds: float = 3.0, signals: Sequence[int] = SIGNALS):
        self._exit_seconds, self._signals = exit_seconds, signals
        self.signal_name: str | None = None
        self.reason: str | None = None
        self.is_cut = False
        self.unsaved: Callable[[], bool] = lambda: True
        self.report: Callable[[str], None] = lambda line: say_beside(f"gregale: {line}")
        self._check_every, self._calls = check_every, 0
        self._old_handlers: dict[int, Any] = {}

    @cached_property
    def _flags(self) -> "tuple[ProcessFlags, ProcessFlags] | None":
        """Return what `agreed` and what `check` exchange; None in a run of one process."""
        return (ProcessFlags(), ProcessFlags()) if jax.process_count() > 1 else None

    def __enter__(self) -> "StopRequest":
        if current_thread() is not main_thread():
            return self
        ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        caught = [number for number in self._signals if number != signal.SIGHUP or not ignores_hangup]
        heard, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        self._listener = Thread(target=self._listen, args=(heard, caught), daemon=True, name="signals")
        self._listener.start()
        self.active.append(self)
        self._old_wakeup = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, self._catch) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        if self in self.active:
            self._end(self._old_wakeup)
            self._listener.join(self._exit_seconds)

    def _end(self, wakeup: int) -> None:
        """Catch no more signals; `wakeup` is the descriptor that the next ones are written to, -1 for none."""
        self.active.remove(self)
        signal.set_wakeup_fd(wakeup)
        for number, handler in self._old_handlers.items():
            # None: the handler was not installed from Python (JAX has one), and Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(self._woken)

    def ask(self, reason: str) -> None:
        """End the run for a reason, a text of one line; the first reason counts."""
        self.reason = self.reason or " ".join(reason.split()).rstrip(".") or "no reason given"

    def agreed(self, step: int) -> bool:
        """Return whether to stop after this step; the same value in every process.

        Every process calls this after every step. It reads the exchange of one multiple of `check_every` at the next
        multiple. By then the exchange is done, so the loop does not wait for the device.
        """
        is_set = self.signal_name is not None or self.reason is not None
        if self.is_cut or self._flags is None:
            return self.is_cut or is_set
        return not step % self._check_every and self._flags[0].exchanged(is_set)

    def check(self) -> None:
        """Raise `Cut` after a signal, in every process at the same call; then `agreed` tells to stop.

        Every process calls this equally often, between batches of what a step does not include. It reads the exchange
        of one multiple of `CHECK_BATCHES` calls at the next one.
        """
        self._calls, is_signalled = self._calls + 1, self.signal_name is not None
        if self._flags is not None:
            is_signalled = not self._calls % CHECK_BATCHES and self._flags[1].exchanged(is_signalled)
        if is_signalled:
            self.is_cut = True
            raise Cut

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if not self.unsaved():
            raise Interrupted(128 + number)
        if self.signal_name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def _listen(self, heard: int, caught: Sequence[int]) -> None:
        """Report signals until the end of the block, and end the process if the main thread does not.

        It counts them itself: Python merges those that come while the main thread is in a compiler into one call.
        """
        is_asked = False
        while numbers := os.read(heard, 64):
            for number in map(signal.Signals, filter(caught.__contains__, numbers)):
                if not self.unsaved():
                    self._exit_later(lambda code=128 + number: self.signal_name or os._exit(code))
                    self.report(f"{number.name}: there is nothing to save, and the command ends.")
                elif not is_asked:
                    self.report(f"{number.name}: the run ends after its present step or batch, and saves its state.")
                elif number == signal.SIGINT:
                    self._exit_later(_exit_now)
                is_asked = True
        os.close(heard)

    def _exit_later(self, exit_: Callable[[], object]) -> None:
        if self.ends_process:
            timer = Timer(self._exit_seconds, exit_)
            timer.daemon = True
            timer.start()


@contextmanager
def stop_on_signals(signals: Sequence[int] = (signal.SIGTERM, signal.SIGHUP)) -> Iterator[StopRequest]:
    """End a command that has nothing to save by a signal, as by Ctrl-C; the exit code is 128 + the signal's number.

    A command of several processes begins it after JAX has joined them: there JAX takes SIGTERM, and does nothing. In a
    single process, such as that of `gregale eval`, JAX leaves the signals alone.
    """
    with StopRequest(signals=signals) as stop:
        stop.unsaved = lambda: False
        yield stop


@contextmanager
def process_goes_on() -> Iterator[None]:
    """Let a second SIGINT inside the block raise KeyboardInterrupt only: the process, such as a notebook's, goes on."""
    before, StopRequest.ends_process = StopRequest.ends_process, False
    try:
        yield
    finally:
        StopRequest.ends_process = before


def _exit_now() -> None:
    os.write(2, b"gregale: interrupted; the unfinished checkpoint is not valid, earlier checkpoints are unchanged\n")
    os._exit(128 + signal.SIGINT)


class ProcessFlags:
    """One flag a process, combined by a logical or; all devices of all processes take part, as in a step.

    A program with several devices of this process runs on CPUs after those handed over before it. A program with one of
    them runs at once: it would overtake a step, in one process earlier in the step than in another, and the collectives
    of both would meet in one connection of Gloo, which aborts the process.
    """

    def __init__(self):
        mesh = Mesh(np.asarray(jax.devices()), ("device",))
        self._split = NamedSharding(mesh, PartitionSpec("device"))
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._last: jax.Array | None = None

    def exchanged(self, flag: bool) -> bool:
        """Return whether any flag was set at the last exchange, for which it waits if necessary; start another one."""
        was_any_set = self._last is not None and bool(self._last.addressable_data(0))
        shape = (self._split.mesh.size,)
        self._last = self._any(jax.make_array_from_callback(shape, self._split, lambda _: np.asarray([flag])))
        return was_any_set


_forking = local()


def _before_fork() -> None:
    """Let signals wait until the child has left those of its parent: they would be written to the parent's pipe."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    for each in StopRequest.active[::-1]:
        each._end(-1)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
