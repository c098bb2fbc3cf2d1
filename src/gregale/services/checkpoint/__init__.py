"""Checkpoints: asynchronous, atomic, checked by checksums, restored under any other mesh."""

from gregale.services.checkpoint.retention import CheckpointConfig
from gregale.services.checkpoint.store import Checkpoints, Restored

__all__ = ["CheckpointConfig", "Checkpoints", "Restored"]
