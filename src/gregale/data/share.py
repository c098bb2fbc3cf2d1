"""What one process does of the building of a store that several build."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from gregale.data.parts import Damaged, Task, discard, read_seal, seal_name
from gregale.data.progress import Report
from gregale.data.sharing import Crew
from gregale.data.workers import Workers
from gregale.storage import Place, files_below

POLL_SECONDS = 0.5


class Share:
    """The parts that this process takes, encodes and seals, and what it knows of the others'.

    Args:
        name: of the source, for progress.
        tasks: all of them.
        parts: where the parts lie.
        crew: this process among the builders.
        workers: encode.
        report: told the bytes of input that are encoded: by all together, and by each other host.
    """

    def __init__(self, name: str, tasks: Sequence[Task], parts: Place, crew: Crew, workers: Workers, report: Report):
        self._name, self._tasks, self._parts, self._crew, self._workers = name, tasks, parts, crew, workers
        self._report = report
        self._pending = self._without_seal()
        self._wanted: tuple[int, ...] = ()
        self._told: dict[str, int] = {}

    def _without_seal(self) -> dict[int, None]:
        found = files_below(self._parts)
        return {task.number: None for task in self._tasks if seal_name(task.number) not in found}

    def want(self, numbers: Iterable[int]) -> None:
        """Says which parts to begin with; any thread may."""
        self._wanted = tuple(numbers)

    def again(self, number: int) -> None:
        """Forgets a part that is damaged, so that it is encoded again; any thread may."""
        discard(self._parts, number)
        self._pending[number] = None

    def encode(self, is_over: Callable[[], bool]) -> None:
        """Encodes what nobody else does until all parts are sealed, or it is over."""
        self._tell()
        most = self._workers.most
        while self._pending and not is_over():
            near = self._crew.neighbours()
            # Those of one machine share its cores; who has it alone keeps a second part waiting for each process.
            wanted = max(1, most // (1 + near)) if near or most == 1 else 2 * most
            for number in self._taken(wanted - len(self._workers)):
                self._workers.start(self._tasks[number])
            if not len(self._workers):
                time.sleep(POLL_SECONDS)
            for task in self._workers.finished(POLL_SECONDS):
                self._crew.release(task.number, task.size_bytes)
                self._pending.pop(task.number, None)
            self._tell()

    def finish(self, put_together: Callable[[bool], None], is_over: Callable[[], bool]) -> None:
        """Puts the store together, or waits a while for who does. What it finds to be damaged is encoded again.

        - `put_together`: is told whether the parts may go meanwhile
        """
        number = len(self._tasks)
        if is_over():
            return
        if not self._crew.claim([number], 1):
            time.sleep(POLL_SECONDS)
            return
        try:
            put_together(not any(note.reads for note in self._crew.look()))
        except Damaged as damaged:
            self.again(damaged.number)
            self._pending |= self._without_seal()
        finally:
            self._crew.release(number, None)

    def _taken(self, count: int) -> Iterator[int]:
        """Takes some of the parts that are neither sealed nor anybody's."""
        pending = list(self._pending)
        first = [number for number in self._wanted if number in self._pending]
        for number in self._crew.claim(dict.fromkeys([*first, *pending]), count) if count > 0 else ():
            if read_seal(self._parts, number) is None:
                yield number
            else:
                self._crew.release(number, None)
                self._pending.pop(number, None)

    def _tell(self) -> None:
        """Hears what the others have done, and reports."""
        others: dict[str, int] = {}
        for note in self._crew.look():
            name = f"{self._name} on {self._crew.name_of(note)}"
            others[name] = others.get(name, 0) + note.done_bytes
            for number in note.finished:
                self._pending.pop(number, None)
        total = sum(task.size_bytes for task in self._tasks)
        done = total - sum(self._tasks[number].size_bytes for number in list(self._pending))
        for name, found in {self._name: done, **others}.items():
            if found and self._told.get(name) != found:
                self._told[name] = found
                self._report(name, found, total)
