"""Gregale: a named-axis training toolkit for language models in JAX."""

__version__ = "0.2.0"
