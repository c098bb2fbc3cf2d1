"""Numbers for a reader of the page."""

from __future__ import annotations

import math
from typing import Any

from rich.filesize import decimal

NONE = "–"


def in_words(value: float | None, unit: str = "") -> str:
    """A number with its unit, as of a chart: "", "bytes", "seconds", "share"."""
    if value is None or not math.isfinite(value):
        return NONE
    if unit == "bytes":
        return decimal(round(value))
    if unit == "seconds":
        return duration(value)
    if unit == "share":
        return f"{value:.1%}"
    whole = float(value).is_integer() or abs(value) >= 1000
    return f"{value:,.0f}" if whole and abs(value) < 1e15 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """`2 h 05 min`, `3 min 20 s`, `4.25 s`, `12 ms`, `3.1 µs`."""
    if 0 < seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s"


def setting(value: Any) -> str:
    """A value of a configuration, as YAML would have it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(setting(each) for each in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {setting(each)}" for name, each in value.items()) + "}"
    return str(value)
