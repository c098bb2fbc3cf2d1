"""What an island makes sure of before it takes over a state that it has fetched: that it is the one of its record.

Pieces have their hashes, but those are of what the source has now. The digest in the record is what the fleet agreed on
when it committed the round, over the arrays of all hosts, so a source whose memory has changed since is found here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gregale.islands.protocol.headers import OuterRecord, Peer
from gregale.islands.transport.transfer import TransferFailed


class FetchedState(NamedTuple):
    """A state that was fetched and fits: its record, and the digest of the arrays.

    - `settled`: no round was being made that would replace it
    """

    outer: OuterRecord
    digest: str
    settled: bool


class DigestMismatch(TransferFailed):
    """What was fetched is whole, but not one state, or not the one that its record says."""


def newest(heal: Callable[[bool], FetchedState], waits: bool, seconds: float) -> OuterRecord:
    """Return the record of a state that nobody is about to replace.

    To fetch the state of a large model may take longer than a round. The first call of `heal` brings most of it. Each
    later one fetches only what has changed since, after the end of a round, so an island joins between two rounds.

    - `heal(settled)`: fetches the state of peers; `settled`: after the round that they are making
    - `waits`: the first call waits for the end of a round too, because a round changes everything
    - `seconds`: after which a state has to do that may be replaced

    Raises what `heal` raises.
    """
    until = time.monotonic() + seconds
    heal(waits)
    while True:
        found = heal(True)
        if found.settled or time.monotonic() >= until:
            return found.outer


def healed(sources: Sequence[Peer], seconds: float, fetch: Callable[[Sequence[Peer]], FetchedState]) -> FetchedState:
    """Return what `fetch` has brought of all sources or, if that is not as recorded, of one after the other.

    - `seconds`: after which no other source is begun with

    Raises TransferFailed.
    """
    until = time.monotonic() + seconds
    try:
        return _checked(sources, fetch)
    except DigestMismatch as error:
        complaints = [str(error)]
    for source in sources if len(sources) > 1 else ():
        if time.monotonic() >= until:
            break
        try:
            return _checked([source], fetch)
        except TransferFailed as error:
            complaints.append(str(error))
    raise TransferFailed("; ".join(complaints))


def _checked(sources: Sequence[Peer], fetch: Callable[[Sequence[Peer]], FetchedState]) -> FetchedState:
    found = fetch(sources)
    outer, digest = found.outer, found.digest
    if digest != outer.digest:
        names = ", ".join(source.name for source in sources)
        raise DigestMismatch(
            f"the arrays of round {outer.round} of {names} have the digest {digest}, their record has {outer.digest}"
        )
    return found
