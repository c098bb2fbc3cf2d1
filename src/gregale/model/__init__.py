"""Models on named axes, their attention kernels, and the loss."""
