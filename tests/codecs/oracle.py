"""Codecs written slowly: NumPy, one block after the other, one value after the other."""

import ml_dtypes
import numpy as np

POWERS = [0.0, *(2.0**k for k in range(-3, 4))]
BITS = {"int8": 8, "int4": 4, "int2": 2, "e3m0": 4}


def quantised(codec: str, values, block: int = 64) -> np.ndarray:
    """What values [n] are after a round trip."""
    values = np.asarray(values, np.float32)
    if codec == "none":
        return values
    if codec == "bfloat16":
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)
    blocks = [values[start : start + block] for start in range(0, len(values), block)]
    return np.concatenate([_block(codec, part) for part in blocks])


def rows_quantised(codec: str, rows, block: int = 64) -> np.ndarray:
    return np.stack([quantised(codec, row, block) for row in rows])


def scale_of(codec: str, values) -> np.float32:
    """The scale of one block, as on the wire."""
    levels = 8 if codec == "e3m0" else 2 ** (BITS[codec] - 1)
    largest = max(values, key=lambda value: (abs(value), value < 0))
    return np.float32(ml_dtypes.bfloat16(np.float32(-largest / levels)))


def _block(codec: str, values) -> np.ndarray:
    scale = scale_of(codec, values)
    if scale == 0:
        return np.zeros_like(values)
    inverse = np.float32(1) / scale
    return np.float32([_value(codec, float(value * inverse)) for value in values]) * scale


def _value(codec: str, scaled: float) -> float:
    if codec == "e3m0":
        magnitude = min(POWERS, key=lambda power: abs(abs(scaled) - power))
        return magnitude if scaled > 0 else -magnitude
    levels = 2 ** (BITS[codec] - 1)
    return max(-levels, min(levels - 1, round(scaled)))  # Python's round goes to the even neighbour, as jnp.round does
