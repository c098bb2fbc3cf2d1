"""Functions that format numbers and settings as text for people."""

import math
from collections.abc import Sequence
from typing import Any

NONE = "–"


def format_quantity(value: float | None, unit: str = "") -> str:
    """Format a number in a unit of the metrics or the charts."""
    if value is None or not math.isfinite(value):
        return NONE
    if unit == "bytes":
        from rich.filesize import decimal  # late: settings read this module

        return decimal(round(value))
    if unit == "seconds":
        return format_precise_duration(value)
    if unit in ("share", "share of 1"):
        return f"{value:.1%}"
    if unit == "tokens/s":
        return f"{value:,.0f} tokens/s"
    if unit in ("nats a token", "bits a byte"):
        return f"{value:.4f}"
    whole = float(value).is_integer() or abs(value) >= 1000
    return f"{value:,.0f}" if whole and abs(value) < 1e15 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Format as `2h 05m`, `3m 20s`, `45s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600:,}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def format_precise_duration(seconds: float) -> str:
    """Format a duration below one minute as `4.25 s`, `12 ms`, `3.1 µs`; use `format_duration` for the others."""
    if 0 < seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
    return f"{seconds:.3g} s" if seconds < 60 else format_duration(seconds)


def listed(words: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Format as `a, b and c`, or `a, b and 3 more`: at most `most` words, and the number of the others."""
    more = [f"{len(words) - most:,} more"] if len(words) > most else []
    *first, last = [*words[:most], *more]
    return f"{separator.join(first)} and {last}" if first else last


def format_setting(value: Any) -> str:
    """Format a value of a configuration as YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(format_setting(each) for each in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {format_setting(each)}" for name, each in value.items()) + "}"
    return str(value)
