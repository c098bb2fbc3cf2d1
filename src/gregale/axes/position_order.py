"""The order in which the devices that share a sequence hold its positions.

A sequence is cut into 2n chunks for n devices. Device i holds the chunks i and 2n - 1 - i, so that under a causal mask
all devices have equal work. Tokens, targets, positions, segments and masks are all in this order.
"""

import numpy as np


def chunk_order(devices: int) -> np.ndarray:
    """Return the chunks of all devices, device by device: integers [2 * devices], as 0 3 1 2 for two devices."""
    first = np.arange(devices)
    return np.stack([first, 2 * devices - 1 - first], axis=1).reshape(-1)


def position_order(length: int, devices: int) -> np.ndarray:
    """Return the positions of a sequence as the devices hold them, integers [length]; in their order on one device."""
    if devices == 1:
        return np.arange(length)
    return np.arange(length).reshape(2 * devices, -1)[chunk_order(devices)].reshape(-1)


def chunks_reached(chunk: int, devices: int, window: int | None) -> int | None:
    """Return how many chunks before its own a query's window reaches; None: keys of all chunks are gathered.

    Each device sends 2 `reach` chunks to its neighbours, or 2 (n - 1) in a gather: the form that sends less is taken.

    - `chunk`: c, positions of a chunk
    - `window`: w, the keys that a query sees at most: it reaches (w - 1) / c chunks; None: all before it
    """
    if window is None:
        return None
    reach = -(-(window - 1) // chunk)
    return reach if reach < devices - 1 else None
