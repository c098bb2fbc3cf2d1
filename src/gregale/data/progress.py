"""Progress reports of the slow steps that prepare data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gregale.streams import printable

Report = Callable[[str, int, int], None]
"""`report(label, done, total)`: amounts of work, in bytes of input."""


def silent(label: str, done: int, total: int) -> None:
    """Discard a report."""


@contextmanager
def progress_bars() -> Iterator[Report]:
    """Yield a report that draws a bar for each label on standard error."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from gregale.terminal import Console

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = {}

        def report(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(printable(label), total=total)
            progress.update(tasks[label], completed=done, total=total)

        yield report
