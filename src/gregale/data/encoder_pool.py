"""Processes that encode the parts of a store.

They import this module and what it needs; it must never import JAX, which would take a device and seconds of start-up
in every one of them.
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
    """Encodes parts, in processes of its own or, if it may have one only, in this one; use it in a `with` statement.

    Args:
        most: processes that there may be.
        tokenizer: by what.
        folder: where the parts lie.
    """

    def __init__(self, most: int, tokenizer: Tokenizer, folder: StoragePath):
        self.most = most
        self._tokenizer, self._folder = tokenizer, folder
        self._pool = None
        if most > 1:
            context = multiprocessing.get_context("spawn")  # they are started when there is work for them
            self._pool = ProcessPoolExecutor(most, context, start_worker, (tokenizer.to_json(),))
        self._running: dict[Future, EncodeTask] = {}
        self._others = set(multiprocessing.active_children())

    def __len__(self) -> int:
        """How many parts are being encoded."""
        return len(self._running)

    def __enter__(self) -> "EncoderPool":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._pool is None:
            return
        if kind is not None:  # after a mistake or Ctrl-C, the parts that are begun are not waited for
            for process in set(multiprocessing.active_children()) - self._others:
                process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def start(self, task: EncodeTask) -> None:
        """Begins with a part; without processes, encodes it."""
        if self._pool is None:
            done: Future = Future()
            self._running[done] = task
            encode_part(task, self._tokenizer, self._folder)
            done.set_result(None)
        else:
            self._running[self._pool.submit(encode_in_worker, task, self._folder)] = task

    def finished(self, timeout_seconds: float) -> list[EncodeTask]:
        """The parts that are sealed since it was asked last, after waiting for one; it raises what went wrong."""
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


_tokenizer_of_worker: list[Tokenizer] = []  # made when a worker starts: a large vocabulary takes a second


def encode_in_worker(task: EncodeTask, folder: StoragePath) -> None:
    """`encode_part` by the tokenizer that this worker was started with."""
    encode_part(task, _tokenizer_of_worker[0], folder)


def start_worker(description: dict) -> None:
    """Makes the tokenizer, leaves Ctrl-C to the parent, and ends this process when the parent is gone, even killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    _tokenizer_of_worker[:] = [from_json(description, "the tokenizer")]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
