"""The check that a fetched state matches the digest of its record.

Chunks have hashes, but the source computes them from its present memory. The digest in the record was agreed when the
fleet committed the round, over the arrays of all hosts. So this check detects a source whose memory has changed since.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gregale.islands.protocol.headers import OuterRecord, Peer
from gregale.islands.transport.transfer import TransferFailed


class FetchedState(NamedTuple):
    """A valid fetched state: its record, and the digest of the arrays.

    - `settled`: no round in progress would replace it
    """

    outer: OuterRecord
    digest: str
    settled: bool


class DigestMismatch(TransferFailed):
    """The fetched arrays are complete, but do not form one state, or not the state of their record."""


def newest(heal: Callable[[bool], FetchedState], waits: bool, seconds: float) -> OuterRecord:
    """Return the record of a fetched state that no round in progress would replace.

    Fetching the state of a large model may take longer than a round. The first call of `heal` fetches most of it. Each
    later one fetches only changes, after the end of a round, so an island joins between two rounds.

    - `heal(settled)`: fetches the state of peers; `settled`: after the round that they are making
    - `waits`: the first call also waits for the end of a round, because a round changes the whole state
    - `seconds`: the time after which a state is accepted although a round may replace it

    Raises the errors of `heal`.
    """
    until = time.monotonic() + seconds
    heal(waits)
    while True:
        found = heal(True)
        if found.settled or time.monotonic() >= until:
            return found.outer


def healed(sources: Sequence[Peer], seconds: float, fetch: Callable[[Sequence[Peer]], FetchedState]) -> FetchedState:
    """Return the state that `fetch` returns for all sources; on a digest mismatch, try each source alone.

    - `seconds`: the time after which no further source is tried

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
