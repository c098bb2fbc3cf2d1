"""Checkpoints: asynchronous, atomic, checked by checksums, restored under any other mesh.

`gregale.checkpoint.store` has `Checkpoints`; it is not imported here, because it loads JAX.
"""

from gregale.checkpoint.retention import CheckpointConfig

__all__ = ["CheckpointConfig"]
