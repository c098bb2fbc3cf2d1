"""Trackers of a run's metrics: the console and `metrics.jsonl` always; TensorBoard, W&B and trackio on request."""

from gregale.tracking.choices import TrackerConfig, check_installed, open_trackers
from gregale.tracking.console import Console
from gregale.tracking.jsonl import JsonlTracker
from gregale.tracking.rate import Rate
from gregale.tracking.tracker import RunInfo, Tracker, Trackers, Values

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
