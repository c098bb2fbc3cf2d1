"""What proves that a request, a reply or a header comes from somebody who has the fleet's token: HMAC-SHA256."""

from __future__ import annotations

import hmac
import json
from hashlib import blake2b
from pathlib import Path

from gregale.errors import UserError

SHORTEST_TOKEN_BYTES = 16


def read_token(path: Path) -> bytes:
    """The token in a file that only its owner may read; white space around it does not count."""
    try:
        mode, token = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise UserError(f"islands.token_file: {path} cannot be read ({error.strerror}).") from None
    if mode & 0o077:
        raise UserError(f"islands.token_file: {path} can be read by others (mode {mode & 0o777:o}): chmod 600 {path}")
    if len(token) < SHORTEST_TOKEN_BYTES:
        raise UserError(
            f"islands.token_file: {path} has {len(token)} bytes; at least {SHORTEST_TOKEN_BYTES} are needed, for "
            f"example from: openssl rand -hex 32 > {path}"
        )
    return token


def sign(token: bytes, *parts: bytes) -> str:
    """HMAC over the parts, each with its length, so that no two lists of parts have the same bytes."""
    mac = hmac.new(token, digestmod="sha256")
    for part in parts:
        mac.update(len(part).to_bytes(8, "big") + part)
    return mac.hexdigest()


def is_signed(token: bytes, signature: str, *parts: bytes) -> bool:
    return hmac.compare_digest(signature.encode(), sign(token, *parts).encode())


def canonical(content: object) -> bytes:
    """JSON that is the same for equal content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(*parts: bytes | memoryview) -> str:
    """Hash of the parts one after the other: 16 bytes of BLAKE2b, as hexadecimal digits."""
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()
