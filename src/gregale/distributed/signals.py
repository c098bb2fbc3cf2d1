"""Stop requests: SIGTERM, SIGINT, SIGHUP and callbacks end a run after a checkpoint, in all processes at one step."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer, current_thread, main_thread
from types import FrameType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

CHECK_EVERY = 10
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """Catches SIGTERM, SIGINT and SIGHUP inside a `with` block.

    SIGHUP, which a closed terminal sends, stays ignored if it is ignored (`nohup`). The first signal only sets
    `signal_name`. A second SIGINT raises KeyboardInterrupt, for a user who cannot wait for the checkpoint. The end of
    the block restores the old handlers. In a thread that is not the main one it catches nothing, because Python calls
    handlers in the main thread only.

    In a run of several processes a signal reaches them at different steps, or reaches only some of them. So all act on
    `agreed` only.

    - `reason`: the reason that a callback of this process gave to end the run; None if none has
    - `check_every`: steps between two exchanges among processes, more than the device has in flight; the processes
      agree on a stop at most twice as many steps after the signal
    - `exit_seconds`: after the second SIGINT this process ends within this time, even if it waits for a store
    """

    ends_process: ClassVar[bool] = True  # after the second SIGINT, see `process_goes_on`

    def __init__(self, check_every: int = CHECK_EVERY, exit_seconds: float = 3.0):
        self._exit_seconds = exit_seconds
        self.signal_name: str | None = None
        self.reason: str | None = None
        self._check_every = check_every
        self._processes = ProcessFlags() if jax.process_count() > 1 else None
        self._old_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if current_thread() is not main_thread():
            return self
        ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        caught = [number for number in _SIGNALS if number != signal.SIGHUP or not ignores_hangup]
        self._old_handlers = {number: signal.signal(number, self._catch) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            # None: the handler was not installed from Python (JAX has one), and Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ask(self, reason: str) -> None:
        """End the run for a reason, a text of one line; the first reason counts."""
        self.reason = self.reason or " ".join(reason.split()).rstrip(".") or "no reason given"

    def agreed(self, step: int) -> bool:
        """Return whether to stop after this step; the same value in every process.

        Every process calls this after every step. It reads the exchange of one multiple of `check_every` at the next
        multiple. By then the exchange is done, so the loop does not wait for the device.
        """
        is_set = self.signal_name is not None or self.reason is not None
        if self._processes is None:
            return is_set
        if step % self._check_every:
            return False
        was_any_set = self._processes.last_any()
        self._processes.exchange(is_set)
        return was_any_set

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None and number == signal.SIGINT:
            if self.ends_process:
                timer = Timer(self._exit_seconds, _exit_now)
                timer.daemon = True
                timer.start()
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name


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

    def exchange(self, flag: bool) -> None:
        """Start an exchange and return at once."""
        shape = (self._split.mesh.size,)
        self._last = self._any(jax.make_array_from_callback(shape, self._split, lambda _: np.asarray([flag])))

    def last_any(self) -> bool:
        """Return whether any flag was set at the last exchange; wait for it if necessary."""
        return self._last is not None and bool(self._last.addressable_data(0))
