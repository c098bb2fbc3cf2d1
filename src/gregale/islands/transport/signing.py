"""What is signed, or compared, of the messages of islands: bytes that are the same for equal content."""

from __future__ import annotations

import json
from hashlib import blake2b


def canonical(content: object) -> bytes:
    """JSON that is the same for equal content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(*parts: bytes | memoryview) -> str:
    """Hash of the parts one after the other: 16 bytes of BLAKE2b, as hexadecimal digits."""
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()
