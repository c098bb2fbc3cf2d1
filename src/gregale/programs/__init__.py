"""The commands, as functions."""
