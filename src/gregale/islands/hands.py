"""What a driver has done by an island's hosts: a `Worker` is one; `AllHands` is host 0 that takes the others along.

    hands = worker                                   # an island of one process
    hands = AllHands(worker, door.hosts(...))        # of several: each of the others has a `follower.Follower`
    driver = Driver(worker=hands, ...)

Each host has its shards, and exchanges them with the same host of the other islands only. A round is made when all
hosts have made it, and a digest is one of all hosts. The trainers of all hosts have to launch the same programs in the
same order, so what the first one is told goes to the others in one stream with what changes the outer side, and all
find that as it was at the same place of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from hashlib import blake2b
from typing import Any, Protocol

from gregale.islands.engine.group import GroupFailed
from gregale.islands.engine.server import Server
from gregale.islands.engine.transfer import TransferFailed
from gregale.islands.healing import Found, NotAsRecorded, healed
from gregale.islands.hosts import Host, HostFailed
from gregale.islands.orders import Order
from gregale.islands.protocol.headers import Outer, Peer
from gregale.islands.showing import SHOW_SECONDS, Heir, Showing, inherit
from gregale.islands.worker import Count, Messages, NotFinite, OuterSide, Timeouts, Worker

HEAL_TRIES = 5
"""How often hosts fetch again whose peers have gone on to another round than those of the others."""


class Hands(Protocol):
    """An island's hosts. Calls come from one thread at a time, but those of `drop_group`, `ordered` and `granted`."""

    @property
    def server(self) -> Server:
        """Of host 0."""
        ...

    @property
    def timeouts(self) -> Timeouts: ...

    @property
    def count(self) -> Count:
        """Bytes that all hosts have sent and received."""
        ...

    @property
    def side(self) -> OuterSide:
        """The outer side as it was when the last order was given."""
        ...

    def ordered(self, order: Order | None) -> None:
        """The trainer is told this (None: take a step); the others' are told the same."""
        ...

    def granted(self, first: int | None) -> None:
        """The next batch begins with this example (None: there is none now)."""
        ...

    def took(self, number: int, messages: Messages) -> None:
        """Keeps host 0's messages of a round; returns when all hosts have theirs."""
        ...

    def reduce(self, key: str, number: int, members: Sequence[Peer], weights: Sequence[float], name: str) -> str:
        """Averages a round's fragment and prepares its outer step; returns the digest of the whole outer side.

        Raises GroupFailed, and NotFinite.
        """
        ...

    def commit(self, key: str, outer: Outer) -> None:
        """Takes over a result, and serves it."""
        ...

    def discard(self, key: str) -> None:
        """Forgets a result."""
        ...

    def drop_group(self) -> None:
        """Lets go of the groups."""
        ...

    def publish(self, outer: Outer) -> None:
        """Serves the state as it is under another record."""
        ...

    def heal(self, sources: Sequence[Peer], settled: bool) -> Found:
        """Fetches the state of peers, beside the own one. Raises TransferFailed.

        - `settled`: waits a few seconds for the end of the round that they are making
        """
        ...

    def install(self, outer: Outer) -> None:
        """Takes over what was fetched, and serves it."""
        ...

    @property
    def heir(self) -> Heir:
        """Host 0's part of the inner optimizer that was inherited."""
        ...

    @property
    def showing(self) -> Showing:
        """Host 0's part of the inner optimizer that is shown."""
        ...

    def inherit(self, sources: Sequence[Peer]) -> None:
        """Fetches the inner optimizer of a peer for all hosts or for none, if it is wanted; `heir` says which."""
        ...

    def copies(self) -> list[str]:
        """Where each host's copy of the own one is, when all have one of the same step. Raises Refused."""
        ...

    def close(self) -> None:
        """Ends what this process has of it."""
        ...


class AllHands:
    """Host 0 and the others, as one."""

    def __init__(self, own: Worker, others: Sequence[Host]):
        self._own, self._others = own, others

    @property
    def server(self) -> Server:
        return self._own.server

    @property
    def timeouts(self) -> Timeouts:
        return self._own.timeouts

    @property
    def count(self) -> Count:
        return self._own.count

    @property
    def side(self) -> OuterSide:
        return self._own.side

    def ordered(self, order: Order | None) -> None:
        self._own.ordered(order)
        self._tell("ordered", None if order is None else [type(order).__name__, *order.told()])

    def granted(self, first: int | None) -> None:
        self._own.granted(first)
        self._tell("granted", first)

    def took(self, number: int, messages: Messages) -> None:
        self._own.took(number, messages)
        for host in self._others:
            host.await_messages()

    def reduce(self, key: str, number: int, members: Sequence[Peer], weights: Sequence[float], name: str) -> str:
        what = [key, number, [list(member) for member in members], list(weights), name]
        asked = [host.ask("reduce", what, failed=self.drop_group) for host in self._others]
        failures: list[Exception] = []
        digests = [self._tried(lambda: self._own.reduce(key, number, members, weights, name), failures)]
        if failures and isinstance(failures[0], GroupFailed):
            self.drop_group()  # else the others would wait until their time is over
        digests += [self._tried(lambda answer=answer: self._counted(answer), failures) for answer in asked]
        if failures:
            self.discard(key)
            raise failures[0]
        return joint_digest(digests)

    def commit(self, key: str, outer: Outer) -> None:
        self._own.commit(key, outer)
        self._tell("commit", key, outer.to_json())

    def discard(self, key: str) -> None:
        self._own.discard(key)
        self._tell("discard", key)

    def drop_group(self) -> None:
        self._tell("drop_group")
        self._own.drop_group()

    def publish(self, outer: Outer) -> None:
        self._own.publish(outer)
        self._tell("publish", outer.to_json())

    def heal(self, sources: Sequence[Peer], settled: bool) -> Found:
        """As `Hands.heal`: with the digest of all hosts' arrays."""
        return healed(sources, self.timeouts.heal, lambda chosen: self._fetch(chosen, settled))

    def _fetch(self, sources: Sequence[Peer], settled: bool) -> Found:
        """The state of peers, of one record on all hosts. Raises TransferFailed."""
        told = [list(source) for source in sources]
        found: dict[int, Found] = {}
        for _ in range(HEAL_TRIES):
            newest = max((each.outer for each in found.values()), key=lambda outer: outer.round, default=None)
            behind = {number for number in range(len(self._others) + 1) if self._is_behind(found.get(number), newest)}
            asked = [
                (host.number, host.ask("fetch", [told, settled])) for host in self._others if host.number in behind
            ]
            if 0 in behind:
                found[0] = self._own.fetch(sources, settled)
            for number, answer in asked:
                record, digest, is_settled = self._fetched(answer)
                found[number] = Found(Outer.from_json(record), digest, is_settled)
            if all(each.outer == found[0].outer for each in found.values()):
                digest = joint_digest([each.digest for _, each in sorted(found.items())])
                return Found(found[0].outer, digest, all(each.settled for each in found.values()))
        rounds = sorted({each.outer.round for each in found.values()})
        raise NotAsRecorded(f"the hosts of this island fetched different states, of rounds {rounds}")

    @staticmethod
    def _is_behind(found: Found | None, newest: Outer | None) -> bool:
        return found is None or found.outer != newest

    def install(self, outer: Outer) -> None:
        self._own.install(outer)
        self._tell("install", outer.to_json())

    @property
    def heir(self) -> Heir:
        return self._own.heir

    @property
    def showing(self) -> Showing:
        return self._own.showing

    def inherit(self, sources: Sequence[Peer]) -> None:
        inherit(self.heir, sources, self._own.token, 1 + len(self._others), self._inherit)

    def _inherit(self, addresses: list[str]) -> list[int]:
        asked = [host.ask("inherit", [address]) for host, address in zip(self._others, addresses[1:], strict=True)]
        return [self.heir.fetch(addresses[0]), *(self._fetched(answer) for answer in asked)]

    def copies(self) -> list[str]:
        address, step = self.showing.wait()
        return [address, *(host.await_shown(step, SHOW_SECONDS) for host in self._others)]

    def close(self) -> None:
        for host in self._others:
            host.close()
        self._own.close()

    def _tell(self, what: str, *arguments: Any) -> None:
        for host in self._others:
            host.tell(what, list(arguments))

    def _counted(self, answer: Future[dict[str, Any]]) -> str:
        """The digest that a host has answered with; its bytes count for the island."""
        try:
            result = answer.result()
        except HostFailed as failed:
            raise (NotFinite if failed.kind == NotFinite.__name__ else GroupFailed)(str(failed)) from None
        self.count.sent += result["sent"]
        self.count.received += result["received"]
        return result["value"]

    def _fetched(self, answer: Future[dict[str, Any]]) -> Any:
        try:
            result = answer.result()
        except HostFailed as failed:
            if failed.kind == NotAsRecorded.__name__:
                raise NotAsRecorded(str(failed)) from None
            raise TransferFailed(str(failed)) from None
        self.count.received += result["received"]
        return result["value"]

    @staticmethod
    def _tried(work: Callable[[], str], failures: list[Exception]) -> str:
        try:
            return work()
        except (GroupFailed, NotFinite) as error:
            failures.append(error)
            return ""


def joint_digest(digests: Sequence[str]) -> str:
    """Of an island's hosts in the order of their numbers; of one host its own."""
    if len(digests) == 1:
        return digests[0]
    return blake2b("".join(digests).encode(), digest_size=16).hexdigest()
