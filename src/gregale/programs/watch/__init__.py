"""Provides `gregale watch`, which shows a running run in the terminal or on a page."""
