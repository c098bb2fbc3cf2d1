"""Provides `gregale plan`, which estimates a run's memory, traffic and time from its compiled programs."""
