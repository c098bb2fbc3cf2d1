"""Who is told of what a training loop does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gregale.distributed.hang_detector import Progress
from gregale.tracking import Trackers
from gregale.tracking.profile import Profile


@dataclass(frozen=True)
class Observers:
    """Those who look on.

    - `trackers`: take the figures of steps and evaluations
    - `report`: told in one line of what fails and does not end the run
    - `progress`: takes where the loop is, for whoever watches that it comes on
    - `profile`: traces some of the steps
    """

    trackers: Trackers
    report: Callable[[str], None]
    progress: Progress = field(default_factory=Progress)
    profile: Profile = field(default_factory=lambda: Profile(None, Path(), print))
