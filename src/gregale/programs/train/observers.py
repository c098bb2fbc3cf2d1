"""Provides the observers of a training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gregale.distributed.hang_detector import Progress
from gregale.tracking.profile import Profile
from gregale.tracking.tracker import Trackers


@dataclass(frozen=True)
class Observers:
    """Observers of a training loop.

    - `trackers`: log the metrics of steps and evaluations
    - `report`: takes one line about a failure that does not end the run
    - `progress`: records the loop's phase, for hang detection
    - `profile`: traces the selected steps
    """

    trackers: Trackers
    report: Callable[[str], None]
    progress: Progress = field(default_factory=Progress)
    profile: Profile = field(default_factory=lambda: Profile(None, Path(), print))
