"""Provides code that programs share: setup of a run, batches, evaluation, and loading of trained models."""
