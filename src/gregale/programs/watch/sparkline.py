"""Provides a curve as a line of text."""

from __future__ import annotations

import numpy as np

BARS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"  # for terminals that cannot write these
NONE = " "
LONG = 20  # bars
SHOWN = 95  # percent of the bars of a long line


def sparkline(values: np.ndarray, width: int, bars: str = BARS) -> str:
    """Return values as a line of at most `width` bars, each the mean of equally many values.

    A bar without finite values is a gap. A long line clips the highest twentieth, so that the high losses of the first
    steps, and spikes, do not flatten the curve.

    - `values`: [point]
    """
    if not len(values) or width < 1:
        return ""
    parts = np.array_split(values, min(width, len(values)))
    means = np.array([known.mean() if len(known := part[np.isfinite(part)]) else np.nan for part in parts])
    known = means[np.isfinite(means)]
    if not len(known):
        return NONE * len(means)
    low, high = known.min(), np.percentile(known, SHOWN) if len(known) >= LONG else known.max()
    heights = np.nan_to_num(np.minimum((means - low) / (high - low), 1) if high > low else np.zeros(len(means)))
    indices = np.minimum((heights * len(bars)).astype(int), len(bars) - 1)
    return "".join(bars[index] if np.isfinite(mean) else NONE for index, mean in zip(indices, means, strict=True))
