"""Stopping on request: SIGTERM, SIGINT and SIGHUP end a run after a checkpoint, in all processes at the same step."""

import os
import signal
from collections.abc import Callable
from threading import Timer
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PATIENCE_SECONDS = 3.0  # of who has interrupted twice
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """Catches SIGTERM, SIGINT and SIGHUP inside a `with` block (in the main thread, as signals demand).

    SIGHUP, which a closed terminal sends, stays ignored where it is (`nohup`). The first signal only sets
    `signal_name`; a second SIGINT raises KeyboardInterrupt, for whoever cannot wait for the checkpoint. The old
    handlers come back when the block is left.

    In a run of several processes a signal reaches them at different steps, or only some of them. `agreed` is what all
    of them may act on.
    """

    def __init__(self, check_every: int = 10, insist: Callable[[], None] = lambda: None):
        """
        Args:
            check_every: steps between two exchanges among processes. It should be more than the steps that the loop
                lets run ahead on the device, and a stop is agreed at most twice as many steps after the signal.
            insist: called before KeyboardInterrupt is raised.
        """
        self._insist = insist
        self.signal_name: str | None = None
        self._check_every = check_every
        self._processes = _ProcessFlags() if jax.process_count() > 1 else None
        self._old_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        caught = [number for number in _SIGNALS if number != signal.SIGHUP or not _is_ignored(number)]
        self._old_handlers = {number: signal.signal(number, self._catch) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            # None is a handler that was not installed from Python (JAX has one); Python cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def agreed(self, step: int) -> bool:
        """Whether to stop after this step; the same answer in every process.

        Every process calls it after every step. What is exchanged at one multiple of `check_every` is looked at at the
        next: by then the exchange is done, so the loop does not wait for the device.
        """
        if self._processes is None:
            return self.signal_name is not None
        if step % self._check_every:
            return False
        was_any_set = self._processes.last_any()
        self._processes.exchange(self.signal_name is not None)
        return was_any_set

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None and number == signal.SIGINT:
            self._insist()
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name


def end_soon(seconds: float = PATIENCE_SECONDS) -> None:
    """Ends this process in a while, whatever it still waits for: a store or a disk that does not answer, say."""
    timer = Timer(seconds, _end)
    timer.daemon = True
    timer.start()


def _end() -> None:
    os.write(2, b"gregale: interrupted; what was being saved does not count, and what was saved before is as it was\n")
    os._exit(128 + signal.SIGINT)


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


class _ProcessFlags:
    """Says whether any process has set its flag; all devices of all processes take part, as in a step.

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
        """Starts an exchange and returns at once."""
        shape = (self._split.mesh.size,)
        self._last = self._any(jax.make_array_from_callback(shape, self._split, lambda _: np.asarray([flag])))

    def last_any(self) -> bool:
        """Whether any process's flag was set at the last exchange; waits for it if need be."""
        return self._last is not None and bool(self._last.addressable_data(0))
