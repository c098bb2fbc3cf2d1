"""Attention by cuDNN's fused kernels for NVIDIA GPUs; other operations use the reference form."""
