"""Operations with differentiation rules for XLA:TPU, and attention by JAX's splash kernels."""
