"""Operations with differentiation rules for XLA:CPU, in plain JAX; docs/design.md has the reasons."""
