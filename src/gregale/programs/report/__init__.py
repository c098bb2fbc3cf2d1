"""Provides `gregale report`, which writes one HTML page about one or more runs."""
