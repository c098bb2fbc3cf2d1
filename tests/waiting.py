"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

WAIT_SECONDS = 120  # of a machine with other work


def until(is_so: Callable[[], object], what: Callable[[], object] = lambda: "it did not come to be") -> None:
    """Wait until something is so; otherwise fail with `what`."""
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < end, what()
        time.sleep(0.02)
