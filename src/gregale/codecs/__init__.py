"""Encodings of values in few bits, with error feedback."""
