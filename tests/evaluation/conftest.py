"""Stores in memory, which the tests of the data layer have."""

from tests.data.conftest import make_store

__all__ = ["make_store"]
