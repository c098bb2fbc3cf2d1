"""The configuration and the directory of a run."""
