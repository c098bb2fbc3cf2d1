"""What processes and islands trust and compare: signatures by a shared token, digests, and terms. Without JAX.

A signature (HMAC-SHA256) proves knowledge of a run's secret, its token. Settings that have to agree are *terms*: a flat
mapping of keys to texts, sent as JSON.
"""

import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gregale.errors import UserError
from gregale.formatting import listed
from gregale.settings import shortened

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


Terms = Mapping[str, str]
ABSENT = "not set"


def to_text(terms: Terms) -> str:
    """Encode terms as one line of JSON, in their order."""
    return json.dumps(dict(terms), separators=(",", ":"))


def from_text(text: str) -> Terms:
    """Decode terms of `to_text`; return any other text as one term, which differs from all others."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and all(isinstance(each, str) for each in value.values()):
        return value
    return {"what has to agree": text}


def format_term(value: Any) -> str:
    """Format a configuration value as a term on one line; a text has no quotes where that is unambiguous."""
    return value if isinstance(value, str) and value and value.isprintable() else json.dumps(value, default=str)


def difference(found: Mapping[str, Terms]) -> str:
    """Return a text with the first differing key, its value in each member, and the other differing keys; "" if none.

    - `found`: the terms of each member, by its name
    """
    keys = dict.fromkeys(key for terms in found.values() for key in terms)
    differing = [key for key in keys if len({terms.get(key) for terms in found.values()}) > 1]
    if not differing:
        return ""
    first, *others = differing
    holders: dict[str, list[str]] = {}
    for name, terms in found.items():
        holders.setdefault(terms.get(first, ABSENT), []).append(name)
    values = [f"{shortened(format_term(value))} in {listed(names)}" for value, names in holders.items()]
    also = f"; also different: {listed([format_term(key) for key in others])}" if others else ""
    return f"{format_term(first)} is {', but '.join(values)}{also}"
