"""What a tracker is, and several as one."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gregale.storage import ObjectPath, StoragePath

Values = Mapping[str, float | int | None]
"""Figures by name; None (and NaN and infinities) where there is no number."""


def finite(values: Values) -> dict[str, float | int]:
    """The figures that are numbers."""
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True)
class RunInfo:
    """What trackers are told about the run.

    Attributes:
        directory: the run directory.
        name: the run's name.
        config: the resolved configuration, as it would go to JSON.
        resumed_from: the step that a resumed run goes on from, 0 for a new one. Figures of later steps that a killed
            process left are taken back where the tracker can do that.
    """

    directory: StoragePath
    name: str
    config: Mapping[str, Any]
    resumed_from: int = 0

    @property
    def files(self) -> Path:
        """Where trackers put files of their own: in the run directory, for a run in a store in `trackers` here."""
        if not isinstance(self.directory, ObjectPath):
            return self.directory
        folder = Path("trackers") / self.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class Tracker(Protocol):
    """Takes figures step by step."""

    def log(self, step: int, values: Values) -> None:
        """Takes the figures of a step; a step may come more than once, with other figures."""
        ...

    def close(self) -> None:
        """Writes out what is held back."""
        ...


class Guarded:
    """A tracker of another project's: that it fails (a full disk, a network that is away) never ends the run."""

    def __init__(self, tracker: Tracker, report: Callable[[str], None]):
        """`report`: told of the first failure."""
        self._tracker, self._report = tracker, report
        self._has_failed = False

    def log(self, step: int, values: Values) -> None:
        self._try(lambda: self._tracker.log(step, values))

    def close(self) -> None:
        self._try(self._tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._has_failed:
                self._report(f"A tracker fails, and the run goes on without it: {type(error).__name__}: {error}")
            self._has_failed = True


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker], flush: Callable[[], None] = lambda: None):
        """`flush`: see the method."""
        self._trackers, self._flush = tuple(trackers), flush

    def log(self, step: int, values: Values) -> None:
        """Hands the figures to every tracker."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def flush(self) -> None:
        """Writes out what belongs to a checkpoint that is about to count; raises `UserError` if that fails."""
        self._flush()

    def close(self) -> None:
        """Closes every tracker, the last first, also when one of them fails."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
