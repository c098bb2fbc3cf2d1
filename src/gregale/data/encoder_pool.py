"""Processes that encode the parts of a store.

The processes import this module and its dependencies. It must never import JAX, which would take a device and seconds
of start-up in each of them.
"""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection

from gregale.data.parts import EncodeTask, encode_part
from gregale.data.tokenizers import Tokenizer, from_json
from gregale.errors import UserError
from gregale.storage import StoragePath

UNGUARDED = "A script that calls this must do so under `if __name__ == '__main__':`, which Python's processes need."


class EncoderPool:
    """Encodes parts in worker processes, or in this process if the limit is one; use it in a `with` statement."""

    def __init__(self, max_processes: int, tokenizer: Tokenizer, folder: StoragePath):
        self._max_processes = max_processes
        self._tokenizer, self._folder = tokenizer, folder
        self._pool = None
        if max_processes > 1:
            context = multiprocessing.get_context("spawn")  # a worker starts when it has work
            self._pool = ProcessPoolExecutor(max_processes, context, start_worker, (tokenizer.saved(), type(tokenizer)))
        self._running: dict[Future, EncodeTask] = {}
        self._others = set(multiprocessing.active_children())

    def __len__(self) -> int:
        """Return the number of parts in progress."""
        return len(self._running)

    def __enter__(self) -> "EncoderPool":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._pool is None:
            return
        if kind is not None:  # after an error or Ctrl-C, do not wait for parts in progress
            for process in set(multiprocessing.active_children()) - self._others:
                process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def start(self, task: EncodeTask) -> None:
        """Start to encode a part; without worker processes, encode it now."""
        if self._pool is None:
            done: Future = Future()
            self._running[done] = task
            encode_part(task, self._tokenizer, self._folder)
            done.set_result(None)
        else:
            self._running[self._pool.submit(encode_in_worker, task, self._folder)] = task

    def finished(self, timeout_seconds: float) -> list[EncodeTask]:
        """Return the parts finished since the last call, after at least one has; raise a worker's error."""
        done, _ = wait(self._running, timeout_seconds, FIRST_COMPLETED)
        try:
            for future in done:
                future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "A process that encodes text died. Either memory ran out (fewer processes need less: lower "
                f"data.workers), or: {UNGUARDED}"
            ) from error
        return [self._running.pop(future) for future in done]


_tokenizer_of_worker: list[Tokenizer] = []  # created when a worker starts: a large vocabulary takes a second


def encode_in_worker(task: EncodeTask, folder: StoragePath) -> None:
    encode_part(task, _tokenizer_of_worker[0], folder)


def start_worker(description: dict, kind: type[Tokenizer]) -> None:
    """Create the tokenizer, ignore Ctrl-C, and exit when the parent exits, even if it is killed.

    - `kind`: unused: to unpickle the class imports its module, which registers a tokenizer of one's own
    """
    del kind
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a process already
    _tokenizer_of_worker[:] = [from_json(description, "the tokenizer")]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
