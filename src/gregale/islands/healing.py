"""What an island makes sure of before it takes over a state that it has fetched: that it is the one of its record.

Pieces have their hashes, but those are of what the source has now. The digest in the record is what the fleet agreed on
when it committed the round, over the arrays of all hosts, so a source whose memory has changed since is found here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gregale.islands.engine.transfer import TransferFailed
from gregale.islands.protocol.headers import Outer, Peer

LOOK_SECONDS = 0.05  # between two looks at whether sources have gone on


class Found(NamedTuple):
    """A state that was fetched and fits: its record, and the digest of the arrays."""

    outer: Outer
    digest: str


class NotAsRecorded(TransferFailed):
    """What was fetched is whole, but not one state, or not the one that its record says."""

    def __init__(self, reason: str):
        super().__init__(reason, {})


def newest(heal: Callable[[], Outer], after: int | None, seconds: float) -> Outer:
    """What `heal` brings: of a round after this one, if that comes in time. Each time only what has changed is fetched.

    - `after`: None: any round will do
    - `seconds`: after which an older one has to do

    Raises what `heal` raises.
    """
    until, outer = time.monotonic() + seconds, heal()
    while after is not None and outer.round <= after and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        outer = heal()
    return outer


def healed(sources: Sequence[Peer], seconds: float, fetch: Callable[[Sequence[Peer]], Found]) -> Outer:
    """The record of what `fetch` has brought of all sources or, if that is not as recorded, of one after the other.

    - `seconds`: after which no other source is begun with

    Raises TransferFailed.
    """
    until = time.monotonic() + seconds
    try:
        return _checked(sources, fetch)
    except NotAsRecorded as error:
        complaints = [str(error)]
    for source in sources if len(sources) > 1 else ():
        if time.monotonic() >= until:
            break
        try:
            return _checked([source], fetch)
        except TransferFailed as error:
            complaints.append(str(error))
    raise TransferFailed("; ".join(complaints), {})


def _checked(sources: Sequence[Peer], fetch: Callable[[Sequence[Peer]], Found]) -> Outer:
    outer, digest = fetch(sources)
    if digest != outer.digest:
        names = ", ".join(source.name for source in sources)
        raise NotAsRecorded(
            f"the arrays of round {outer.round} of {names} have the digest {digest}, their record has {outer.digest}"
        )
    return outer
