"""An island's part in the reduce of a round, while it is watched whether the others answer."""

from __future__ import annotations

from collections.abc import Callable

from gregale.islands.engine.group import GroupFailed
from gregale.islands.hands import Hands
from gregale.islands.protocol import messages as protocol
from gregale.islands.protocol.member import Member
from gregale.islands.watching import Watch
from gregale.islands.worker import NotFinite


def exchanged(
    action: protocol.Reduce, member: Member, worker: Hands, token: bytes, report: Callable[[str, bool], None]
) -> protocol.Reduced | protocol.ReduceFailed:
    """Reduces a round with its members; returns what the protocol has to be told of it."""
    own, heartbeat = member.identity.name, member.timing.heartbeat_seconds
    others = {peer.name: peer.hosts[0] for peer in action.members if peer.name != own}
    watch = Watch(others, token, heartbeat, worker.drop_group)
    try:
        with watch:
            digest = worker.reduce(action.key, action.round, action.members, action.weights, own)
    except NotFinite:
        return protocol.ReduceFailed(action.key, overflowed=True)
    except GroupFailed as error:
        report(f"Round {action.round} is tried again: {watch.reason() or error}", False)
        return protocol.ReduceFailed(action.key, tuple(watch.silent))
    return protocol.Reduced(action.key, digest)
