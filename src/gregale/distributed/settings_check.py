"""The processes of a run compare their settings and versions before JAX joins them, and end together if they differ.

Process 0 compares the terms of all processes and sends the result, so all processes end with the same message.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jax
import jaxlib.version

import gregale
from gregale.distributed.agreement import Terms, difference, from_text, to_text
from gregale.distributed.config import DistributedConfig
from gregale.distributed.liveness import EXIT_CODE, Peer, log_line, process_label
from gregale.errors import UserError

RULE = "All processes of a run need the same configuration, text, and versions of Gregale and JAX."
OTHER_VERSION = "runs another version of Gregale, which does not tell its settings"


def version_terms() -> Terms:
    """Return the versions that all processes of a run need to have in common."""
    return {
        "the version of Gregale": gregale.__version__,
        "the digest of Gregale's source": source_digest(),
        "the version of JAX": jax.__version__,
        "the version of jaxlib": jaxlib.version.__version__,
    }


@cache
def source_digest() -> str:
    """Return a digest of the source of this package, which two checkouts of one version may have different."""
    folder, found = Path(gregale.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def agree(peers: Sequence[Peer], config: DistributedConfig, terms: Terms) -> None:
    """Compare the settings of all processes; raise `UserError` in all of them if they differ.

    Ends the process with the exit code of a lost one if another one is lost meanwhile.

    - `peers`: as `roll_call` returns them
    - `terms`: the settings of this process; the versions of Gregale and JAX are added
    """
    own = {**version_terms(), **terms}
    if config.process == 0:
        found: dict[str, Terms] = {process_label(0): own}
        for peer in peers:
            found[peer.name] = from_text(_told(peer, "settings", config.timeout_seconds))
        if differs := difference(found):
            text = f"{differs}. {RULE}"
            for peer in peers:
                peer.tell(f"no {text}")
            raise UserError(text)
        for peer in peers:
            peer.tell("agreed ")
        return
    (process_0,) = peers
    process_0.tell(f"settings {to_text(own)}")
    _told(process_0, "agreed", 2 * config.timeout_seconds)


def _told(peer: Peer, word: str, seconds: float) -> str:
    """Return what a peer says behind a word; raise the `UserError` that it tells in place of that."""
    peer.connection.settimeout(seconds)
    line = peer.line()
    if line is None:
        log_line(f"error: {peer.name} was lost while the settings of all processes were compared.")
        sys.exit(EXIT_CODE)
    peer.connection.settimeout(None)
    found, _, rest = line.partition(" ")
    if found == "no":
        raise UserError(rest)
    if found != word:
        raise UserError(f"{peer.name} {OTHER_VERSION}. {RULE}")
    return rest
