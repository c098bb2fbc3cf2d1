"""Where a run's figures go: the console and `metrics.jsonl` always, TensorBoard, W&B and trackio on request."""

from gregale.services.tracking.choices import TrackerConfig, check_installed, open_trackers
from gregale.services.tracking.console import Console
from gregale.services.tracking.jsonl import JsonlTracker
from gregale.services.tracking.rate import Rate
from gregale.services.tracking.tracker import RunInfo, Tracker, Trackers, Values

__all__ = [
    "Console",
    "JsonlTracker",
    "Rate",
    "RunInfo",
    "Tracker",
    "TrackerConfig",
    "Trackers",
    "Values",
    "check_installed",
    "open_trackers",
]
