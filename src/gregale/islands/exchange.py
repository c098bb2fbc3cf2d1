"""The exchanges of an island with its peers, reported to the protocol: the reduce of a round, and healing."""

import time
from collections.abc import Callable

from gregale.islands.host_group import HostGroup
from gregale.islands.host_worker import FetchedState, NotFinite
from gregale.islands.peer_probe import PeerProbe
from gregale.islands.protocol import messages as protocol
from gregale.islands.protocol.headers import OuterRecord
from gregale.islands.protocol.member import Member
from gregale.islands.protocol.spread import distances
from gregale.islands.trainer_command import RoundPacing
from gregale.islands.transport.group import GroupFailed
from gregale.islands.transport.transfer import TransferFailed


def exchanged(
    action: protocol.Reduce, member: Member, worker: HostGroup, token: bytes, report: Callable[[str, bool], None]
) -> protocol.Reduced | protocol.ReduceFailed:
    """Reduce a round with its members and return the resulting protocol event."""
    own, heartbeat = member.identity.name, member.timing.heartbeat_seconds
    place, count = [peer.name for peer in action.members].index(own), len(action.members)
    # A round that has failed is tried again with probes of all members, because the protocol leaves silent ones out.
    probed = range(1, count) if member.header.failures else distances(count)
    others = {peer.name: peer.hosts[0] for peer in (action.members[(place + each) % count] for each in probed)}
    watch = PeerProbe(others, token, heartbeat, worker.drop_group)
    try:
        with watch:
            digest = worker.reduce(action.key, action.round, action.members, action.weights, own)
    except NotFinite:
        return protocol.ReduceFailed(action.key, overflowed=True)
    except GroupFailed as error:
        report(f"Round {action.round} is tried again: {watch.reason() or error}", False)
        return protocol.ReduceFailed(action.key, tuple(watch.silent))
    return protocol.Reduced(action.key, digest)


def fetched(action: protocol.Heal, worker: HostGroup, pace: RoundPacing) -> protocol.Healed | protocol.HealFailed:
    """Fetch the state of peers, with their inner optimizer if it is wanted, and return the resulting protocol event."""
    sources, is_whole = action.sources, pace.schedule.fragments == 1  # then a round changes the whole state
    try:
        outer = newest(lambda settled: worker.heal(sources, settled), is_whole, worker.timeouts.reduce)
        worker.inherit(sources)
        return protocol.Healed(outer)
    except TransferFailed as error:
        return protocol.HealFailed(str(error))


def newest(heal: Callable[[bool], FetchedState], waits: bool, seconds: float) -> OuterRecord:
    """Return the record of a fetched state that no round in progress would replace.

    Fetching the state of a large model may take longer than a round. The first call of `heal` fetches most of it. Each
    later one fetches only changes, after the end of a round, so an island joins between two rounds. Raises the errors
    of `heal`.

    - `heal(settled)`: fetches the state of peers; `settled`: after the round that they are making
    - `waits`: the first call also waits for the end of a round, because a round changes the whole state
    - `seconds`: the time after which a state is accepted although a round may replace it
    """
    until = time.monotonic() + seconds
    heal(waits)
    while True:
        found = heal(True)
        if found.settled or time.monotonic() >= until:
            return found.outer
