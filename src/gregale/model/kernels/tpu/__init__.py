"""Operations with differentiation rules for XLA:TPU, and attention by own kernels."""
