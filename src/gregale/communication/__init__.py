"""Accumulation, reduction over `replica`, quantised averages, and pipelines."""
