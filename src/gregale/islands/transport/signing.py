"""Canonical JSON and digests, for signatures and comparisons of islands' messages."""

import json
from hashlib import blake2b


def canonical(content: object) -> bytes:
    """Return JSON bytes that are the same for equal content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(*parts: bytes | memoryview) -> str:
    """Return the hash of the concatenated parts: 16 bytes of BLAKE2b, as hexadecimal digits."""
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()
