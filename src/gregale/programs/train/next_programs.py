"""Provides the compilation of a stage's programs while the stage before it trains."""

from contextlib import suppress
from threading import Thread

import jax

from gregale.methods.method import Method
from gregale.programs.plan.shapes import abstract_batch
from gregale.programs.train.stages import PreparedStage
from gregale.streams import LEFT_AT_EXIT
from gregale.training.state import abstract_state

FIRST_STEPS = 10_000  # of a stage, in which its programs are looked for


class NextPrograms:
    """Compiles the steps of a stage in a thread, from shapes alone. The first steps of the stage find them compiled.

    An error is left to the steps of the stage, which compile then and raise it. The process of a command that ends
    before does not wait for the compiler, unless other processes train with it: they end together.

    - `first`: steps before the stage
    """

    def __init__(self, stage: PreparedStage, first: int):
        self._stage, self._first, self._is_ended = stage, first, False
        # No daemon: Python would abort the process when a daemon returns from the compiler while Python exits.
        self._thread = Thread(target=self._compile, name=LEFT_AT_EXIT if jax.process_count() == 1 else "compile")

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Wait until the programs are compiled."""
        if self._thread.ident is not None:
            self._thread.join()

    def end(self) -> None:
        """Begin no further program."""
        self._is_ended = True

    def _compile(self) -> None:
        setup, warm = self._stage.setup, self._stage.setup.config.sync.warm_up()
        begin, end = self._first + 1, self._stage.last + 1
        parts: list[tuple[Method, range]] = [(setup.psdp, range(begin, min(end, warm + 1)))]
        parts += [(setup.method, range(max(begin, warm + 1), end))]
        with suppress(Exception):
            for method, steps in parts:
                state, batch = abstract_state(method, setup.model), abstract_batch(setup)
                for program in self._stage.stepper(method).compilations(state, batch, steps[:FIRST_STEPS]):
                    if self._is_ended:
                        return
                    program()
