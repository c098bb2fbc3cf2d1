"""Asynchronous, atomic checkpoints with checksums, which can be restored under any mesh.

`gregale.checkpoint.store` has `Checkpoints`; it is not imported here, because it loads JAX.
"""

from gregale.checkpoint.manifest import CheckpointConfig
