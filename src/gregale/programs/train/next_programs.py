"""Provides the compilation of a stage's programs while the stage before it trains."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Thread

import jax

from gregale.streams import LEFT_AT_EXIT


class NextPrograms:
    """Compiles programs in a thread, from shapes alone. Their first calls in the next stage find them compiled.

    An error is left to the stage, which compiles then and raises it. The process of a command that ends before does not
    wait for the compiler, unless other processes train with it: they end together.

    - `compilations`: functions that compile one program each; none if no stage follows
    """

    def __init__(self, compilations: Iterable[Callable[[], object]]):
        self._compilations, self._is_ended = compilations, False
        # No daemon: Python would abort the process when a daemon returns from the compiler while Python exits.
        self._thread = Thread(target=self._compile, name=LEFT_AT_EXIT if jax.process_count() == 1 else "compile")

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread.ident is None:
            self._thread.start()

    def wait(self) -> None:
        """Wait until the programs are compiled."""
        if self._thread.ident is not None:
            self._thread.join()

    def end(self) -> None:
        """Begin no further program."""
        self._is_ended = True

    def _compile(self) -> None:
        with suppress(Exception):
            for program in self._compilations:
                if self._is_ended:
                    return
                program()
