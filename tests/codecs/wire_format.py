"""Codecs written from the section "Wire format" of docs/quantised.md alone: plain Python, one value after the other."""

import struct
from math import ceil, copysign, inf, isfinite, nan, sqrt

import numpy as np

BITS = {"int8": 8, "int4": 4, "int2": 2, "e3m0": 4}
LEVELS = {"int8": 128, "int4": 8, "int2": 2, "e3m0": 8}
LARGEST_BFLOAT16 = (2 - 2**-7) * 2.0**127
SIGNS_OF_64 = 0x7EE6E00A766FFE07


def float32(number: float) -> float:
    """Rounded to float32; what is below 2^-126 is 0."""
    rounded = struct.unpack("<f", struct.pack("<f", number))[0]
    return copysign(0.0, number) if abs(rounded) < 2.0**-126 else rounded


def bfloat16_bits(number: float) -> int:
    (u,) = struct.unpack("<I", struct.pack("<f", number))
    if number != number:
        return 0xFFC0 if u >> 31 else 0x7FC0
    return (u + 0x7FFF + ((u >> 16) & 1)) >> 16


def bfloat16_value(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def encode(codec: str, values: list[float], block: int = 64) -> bytes:
    """The message of values that float32 holds."""
    if codec == "none":
        return b"".join(struct.pack("<f", value) for value in values)
    if codec == "bfloat16":
        return b"".join(struct.pack("<H", bfloat16_bits(value)) for value in values)
    if codec == "topk":
        return b"".join(topk_message(part, block) for part in blocks_of(values, block))
    return b"".join(encode_block(codec, part) for part in padded_blocks(values, block))


def blocks_of(values: list, block: int) -> list[list]:
    return [values[start : start + block] for start in range(0, len(values), block)]


def kept_of(size: int, block: int) -> int:
    """One of 64 values of a block, and of a shorter one the same share, rounded up."""
    return ceil(ceil(block / 64) * size / block)


def parts_of(kept: int) -> list[range]:
    count = min(kept, 4)
    return [range(part * kept // count, (part + 1) * kept // count) for part in range(count)]


def topk_message(values: list[float], block: int) -> bytes:
    is_bad, kept = not all(map(isfinite, values)), kept_of(len(values), block)
    numbers = [value if isfinite(value) and abs(value) >= 2.0**-126 else 0.0 for value in values]
    sizes = [abs(number) if isfinite(value) else inf for number, value in zip(numbers, values, strict=True)]
    places = sorted(range(len(values)), key=lambda place: (-sizes[place], place))[:kept]
    found = np.float32([abs(numbers[place]) for place in places])
    magnitudes = [nan if is_bad else float(np.mean(found[list(part)])) for part in parts_of(kept)]
    signs = [numbers[place] < 0 for place in places]
    packed = sum(place << 12 * index for index, place in enumerate(places)).to_bytes(3 * ceil(kept / 2), "little")
    packed += sum(sign << index for index, sign in enumerate(signs)).to_bytes(ceil(kept / 8), "little")
    return packed + b"".join(struct.pack("<H", bfloat16_bits(magnitude)) for magnitude in magnitudes)


def topk_values(message: bytes, size: int, block: int) -> list[float]:
    kept, found = kept_of(size, block), [0.0] * size
    cut = 3 * ceil(kept / 2)
    places = [int.from_bytes(message[:cut], "little") >> 12 * index & 0xFFF for index in range(kept)]
    signs = [int.from_bytes(message[cut : cut + ceil(kept / 8)], "little") >> index & 1 for index in range(kept)]
    magnitudes = struct.unpack(f"<{min(kept, 4)}H", message[cut + ceil(kept / 8) :])
    for part, magnitude in zip(parts_of(kept), magnitudes, strict=True):
        for index in part:
            found[places[index]] = bfloat16_value(magnitude) * (-1 if signs[index] else 1)
    return found


def padded_blocks(values: list[float], block: int) -> list[list[float]]:
    values = values + [0.0] * (-len(values) % block)
    return [values[start : start + block] for start in range(0, len(values), block)]


def encode_block(codec: str, values: list[float]) -> bytes:
    scale = scale_bits(codec, values)
    bits, part = BITS[codec], len(values) * BITS[codec] // 8
    codes = block_codes(codec, values, bfloat16_value(scale))
    packed = [sum(codes[j + k * part] << (bits * k) for k in range(8 // bits)) for j in range(part)]
    return bytes(packed) + struct.pack("<H", scale)


def scale_bits(codec: str, values: list[float]) -> int:
    if not all(map(isfinite, values)):
        return 0x7FC0
    x_max = max(values, key=lambda value: (abs(value), value < 0))
    t = -x_max / LEVELS[codec]
    if abs(t) > (2.0**126 if codec == "int2" else LARGEST_BFLOAT16 / LEVELS[codec]):
        return 0x7FC0
    return 0 if abs(t) < 2.0**-126 else bfloat16_bits(t)


def block_codes(codec: str, values: list[float], scale: float) -> list[int]:
    if scale != scale:
        return [7 if codec == "e3m0" else 0] * len(values)
    r = float32(1 / scale) if scale else 0.0
    scaled = [float32(float32(value) * r) for value in values]
    if codec == "e3m0":
        return [nibble(y) for y in scaled]
    levels = LEVELS[codec]
    return [max(-levels, min(levels - 1, round(y))) + levels for y in scaled]  # Python rounds ties to even


def nibble(y: float) -> int:
    sign = 8 if copysign(1, y) < 0 else 0
    if abs(y) < 1 / 16:
        return sign
    nearest = min(range(1, 8), key=lambda p: (abs(abs(y) - 2.0 ** (p - 4)), -p))
    return sign | nearest


def decode(codec: str, message: bytes, size: int, block: int = 64) -> list[float]:
    if codec == "none":
        return [struct.unpack_from("<f", message, 4 * i)[0] for i in range(size)]
    if codec == "bfloat16":
        return [bfloat16_value(struct.unpack_from("<H", message, 2 * i)[0]) for i in range(size)]
    if codec == "topk":
        sizes = [min(block, size - start) for start in range(0, size, block)]
        length = len(topk_message([0.0] * block, block))
        parts = [message[start : start + length] for start in range(0, len(message), length)]
        return [value for part, n in zip(parts, sizes, strict=True) for value in topk_values(part, n, block)]
    length = block * BITS[codec] // 8 + 2
    parts = [message[start : start + length] for start in range(0, len(message), length)]
    return [value for part in parts for value in decode_block(codec, part)][:size]


def decode_block(codec: str, message: bytes) -> list[float]:
    bits, packed = BITS[codec], message[:-2]
    scale = bfloat16_value(struct.unpack("<H", message[-2:])[0])
    codes = [(byte >> (bits * k)) & (2**bits - 1) for k in range(8 // bits) for byte in packed]
    return [float32(value_of(codec, code) * scale) if scale == scale else nan for code in codes]


def value_of(codec: str, code: int) -> float:
    if codec != "e3m0":
        return float(code - LEVELS[codec])
    return 0.0 if code & 7 == 0 else copysign(2.0 ** ((code & 7) - 4), -1 if code & 8 else 1)


def round_trip(codec: str, values, block: int = 64) -> np.ndarray:
    """What values [..., n] are after a round trip; each row is a message."""
    rows = np.asarray(values, np.float32).reshape(-1, np.shape(values)[-1])
    messages = [encode(codec, row.tolist(), block) for row in rows]
    found = [decode(codec, message, rows.shape[1], block) for message in messages]
    return np.float32(found).reshape(np.shape(values))


def rotated(values: list[float], block: int, signs: list[int]) -> list[float]:
    """Every block x, as x R."""
    matrix = [
        [float32(signs[i] * (-1) ** (i & j).bit_count() / sqrt(block)) for j in range(block)] for i in range(block)
    ]
    return [
        float32(sum(x * row[j] for x, row in zip(part, matrix, strict=True)))
        for part in padded_blocks(values, block)
        for j in range(block)
    ]


def signs_of_64() -> list[int]:
    return [1 if SIGNS_OF_64 >> i & 1 else -1 for i in range(64)]
