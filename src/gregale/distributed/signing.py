"""HMAC-SHA256 signatures that prove knowledge of a run's secret, its token; digests, and JSON to sign."""

import hmac
import json
from hashlib import blake2b
from pathlib import Path

from gregale.errors import UserError

MIN_TOKEN_BYTES = 16


def read_token(path: Path, key: str) -> bytes:
    """Read the token from a file that only its owner may read; white space around the token is ignored.

    - `key`: the configuration key that names the file

    Raises `UserError` if there is no file, if the token is too short, or if others can read the file.
    """
    try:
        mode, token = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read ({error.strerror}).") from None
    if mode & 0o077:
        raise UserError(f"{key}: {path} can be read by others (mode {mode & 0o777:o}): chmod 600 {path}")
    if len(token) < MIN_TOKEN_BYTES:
        raise UserError(
            f"{key}: {path} has {len(token)} bytes; at least {MIN_TOKEN_BYTES} are needed, for example from: "
            f"openssl rand -hex 32 > {path}"
        )
    return token


def sign(token: bytes, *parts: bytes) -> str:
    """Return the HMAC of the parts, each with its length, so that different lists of parts differ in bytes."""
    mac = hmac.new(token, digestmod="sha256")
    for part in parts:
        mac.update(len(part).to_bytes(8, "big") + part)
    return mac.hexdigest()


def is_signed(token: bytes, signature: str, *parts: bytes) -> bool:
    """Return whether a signature is valid for the parts."""
    return hmac.compare_digest(signature.encode(), sign(token, *parts).encode())


def canonical(content: object) -> bytes:
    """Return JSON bytes that are the same for equal content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(*parts: bytes | memoryview) -> str:
    """Return the hash of the concatenated parts: 16 bytes of BLAKE2b, as hexadecimal digits."""
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()
