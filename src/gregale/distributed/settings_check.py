"""The comparison of settings, environment and versions among the processes of a run, before JAX joins them.

Process 0 compares the terms of all processes and sends the result. If they differ, all end with the same message.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import jax
import jaxlib.version

from gregale.distributed.agreement import Terms, difference, format_term, from_text, to_text
from gregale.distributed.config import DistributedConfig
from gregale.distributed.liveness import EXIT_CODE, Peer, log_line, process_label
from gregale.errors import UserError
from gregale.version import __version__

RULE = "All processes of a run need the same configuration, environment, text, and versions of Gregale and JAX."
OTHER_VERSION = "runs another version of Gregale, which does not send its settings"

# Values of JAX and flags that leave the programs of a run as they are, so that its processes may differ in them.
MAY_DIFFER = (
    *("jax_*_visible_devices", "jax_cross_host_*address*"),  # a process's devices on its host, and the host's addresses
    *("*_cache*", "jax_raise_persistent_cache_errors"),  # where and how compiled programs are kept
    *("jax_dump_*", "*xla_dump_*", "jax_include_debug_info_in_dumps"),  # files for the user
    *("jax_log*", "*_debug_log*", "*_distributed_debug", "*_logging_*", "jax_trace*", "*_pprint_*"),  # its own log
)


def environment_terms() -> Terms:
    """Return the values of JAX, and the flags of XLA and libtpu, that all processes of a run must have in common.

    They come from the environment and from a program's own calls. A flag whose value is a path may differ: hosts have
    different folders. Call this before Gregale adds flags of its own, which depend on the number of processors.
    """
    values = {name: format_term(value) for name, value in jax.config.values.items()}
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        flags = [flag.partition("=") for flag in os.environ.get(variable, "").split()]
        values |= {f"{variable} {name}": value or "true" for name, _, value in flags if os.sep not in value}
    return {name: value for name, value in values.items() if not any(fnmatchcase(name, each) for each in MAY_DIFFER)}


def version_terms() -> Terms:
    """Return the versions that all processes of a run must have in common."""
    return {
        "the version of Gregale": __version__,
        "the digest of Gregale's source": source_digest(),
        "the version of JAX": jax.__version__,
        "the version of jaxlib": jaxlib.version.__version__,
    }


@cache
def source_digest() -> str:
    """Return a digest of the source of this package; two checkouts of one version may differ in it."""
    folder, found = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def agree(peers: Sequence[Peer], config: DistributedConfig, terms: Terms) -> None:
    """Compare the settings of all processes; raise `UserError` in all of them if they differ.

    Exits with the code for a lost process if another process is lost meanwhile.

    - `peers`: the result of `wait_for_processes`
    - `terms`: the settings of this process; the versions of Gregale and JAX are added
    """
    own = {**version_terms(), **terms}
    if config.process == 0:
        found: dict[str, Terms] = {process_label(0): own}
        for peer in peers:
            found[peer.name] = from_text(_receive(peer, "settings", config.timeout_seconds))
        if differs := difference(found):
            text = f"{differs}. {RULE}"
            for peer in peers:
                peer.send(f"no {text}")
            raise UserError(text)
        for peer in peers:
            peer.send("agreed ")
        return
    (process_0,) = peers
    process_0.send(f"settings {to_text(own)}")
    _receive(process_0, "agreed", 2 * config.timeout_seconds)


def _receive(peer: Peer, word: str, seconds: float) -> str:
    """Return the rest of a peer's line that begins with a word; raise `UserError` if the peer sends an error."""
    peer.connection.settimeout(seconds)
    line = peer.next_line()
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
