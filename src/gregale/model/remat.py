"""The values of a layer that are saved for the backward pass, by the policies of `compute.remat`."""

from haliax import NamedArray
from haliax.nn import ScanCheckpointPolicy
from jax.ad_checkpoint import checkpoint_name

from gregale.model.kernels.kernels import ATTENTION_NAME

# Names of a block's intermediates (`jax.ad_checkpoint.checkpoint_name`), which remat policies use.
PROJECTIONS = ["query", "key", "value", ATTENTION_NAME, "attention_out", "gate", "up", "mlp_out"]

CARRY, WEIGHTS = "layer_input", "layer_weights"  # the names of a layer's inputs

CONTEXT = ScanCheckpointPolicy(save_block_internals=[ATTENTION_NAME])  # avoids a second forward pass of attention

REMAT_POLICIES = {
    "none": ScanCheckpointPolicy(disable=True),
    "full": ScanCheckpointPolicy(simple=True),
    "context": CONTEXT,
    "context_offload": ScanCheckpointPolicy(offload_block_internals=[ATTENTION_NAME]),
    "projections": ScanCheckpointPolicy(save_block_internals=PROJECTIONS),
    "offload": ScanCheckpointPolicy(save_carries="offload"),
}

# If `model` splits the stream (`Execution.stream`), a device also keeps its part of attention's output. So the backward
# pass adds nothing over `model` again, which pays for the gathers that it repeats.
PART = "part_of_"
PARTS = [f"{PART}attention_out"]
SPLIT_POLICIES = {
    "none": REMAT_POLICIES["none"],
    "full": ScanCheckpointPolicy(save_block_internals=PARTS),
    "context": ScanCheckpointPolicy(save_block_internals=[ATTENTION_NAME, *PARTS]),
    "context_offload": ScanCheckpointPolicy(save_block_internals=PARTS, offload_block_internals=[ATTENTION_NAME]),
    "offload": ScanCheckpointPolicy(save_carries="offload", offload_block_internals=PARTS),
}

TO_HOST = ("offload", "context_offload")  # policies that move saved values to the host's memory

# Layers unrolled in the scan over layers. On CPU the loop's slices and copies cost more than the compile time saves.
UNROLL = {"cpu": 4}


def named(x: NamedArray, name: str) -> NamedArray:
    """Name an intermediate for remat policies."""
    return NamedArray(checkpoint_name(x.array, name), x.axis_names)
