"""Rules of differentiation for XLA:CPU, in plain JAX; docs/design.md says why."""
