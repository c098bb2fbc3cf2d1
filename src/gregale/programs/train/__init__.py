"""Provides `gregale train`, which trains, evaluates, saves and resumes a run."""
