"""What proves that a message comes from somebody who has a run's secret, its token: HMAC-SHA256."""

from __future__ import annotations

import hmac
from pathlib import Path

from gregale.errors import UserError

SHORTEST_TOKEN_BYTES = 16


def read_token(path: Path, key: str) -> bytes:
    """The token in a file that only its owner may read; white space around it does not count.

    - `key`: of the configuration, that names the file

    Raises `UserError` if there is none, if it is too short, or if others can read it.
    """
    try:
        mode, token = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read ({error.strerror}).") from None
    if mode & 0o077:
        raise UserError(f"{key}: {path} can be read by others (mode {mode & 0o777:o}): chmod 600 {path}")
    if len(token) < SHORTEST_TOKEN_BYTES:
        raise UserError(
            f"{key}: {path} has {len(token)} bytes; at least {SHORTEST_TOKEN_BYTES} are needed, for example from: "
            f"openssl rand -hex 32 > {path}"
        )
    return token


def sign(token: bytes, *parts: bytes) -> str:
    """HMAC over the parts, each with its length, so that no two lists of parts have the same bytes."""
    mac = hmac.new(token, digestmod="sha256")
    for part in parts:
        mac.update(len(part).to_bytes(8, "big") + part)
    return mac.hexdigest()


def is_signed(token: bytes, signature: str, *parts: bytes) -> bool:
    """Whether a signature is that of the parts."""
    return hmac.compare_digest(signature.encode(), sign(token, *parts).encode())
