"""A curve in a line of text."""

from __future__ import annotations

import numpy as np

BARS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"  # for terminals that cannot write these
NONE = " "
LONG = 20  # bars
SHOWN = 95  # percent of the bars of a long line


def sparkline(values: np.ndarray, width: int, bars: str = BARS) -> str:
    """Values as a line of at most `width` bars, each the mean of as many of them, from the least to the largest.

    Where there is no number the line has a gap. In a long one the highest twentieth is cut off, so that a loss has a
    shape after its first steps, and a curve beside its spikes.

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
    places = np.minimum((heights * len(bars)).astype(int), len(bars) - 1)
    return "".join(bars[place] if np.isfinite(mean) else NONE for place, mean in zip(places, means, strict=True))
