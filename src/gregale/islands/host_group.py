"""The hosts of an island as one object for its driver: host 0's `HostWorker`, and a connection to each other host.

Each host has its shards, and exchanges them only with the same host of the other islands. A round is complete when all
hosts have completed it; its digest covers all hosts. The trainers of all hosts must launch the same programs in the
same order. So host 0 sends trainer commands and changes of the outer state in one stream, and all hosts apply each
command to the same outer state.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from hashlib import blake2b
from typing import Any

from gregale.islands.host_connection import RemoteHost
from gregale.islands.host_worker import DigestMismatch, FetchedState, HostWorker, Messages, NotFinite, OuterSnapshot
from gregale.islands.inner_optimizer_state import InnerOptimizerState
from gregale.islands.protocol.headers import OuterRecord, Peer
from gregale.islands.protocol.messages import Reduce
from gregale.islands.trainer_command import TrainerCommand
from gregale.islands.transport.client import Dial, PeerUnreachable, RequestRejected, call
from gregale.islands.transport.group import GroupFailed
from gregale.islands.transport.transfer import TransferFailed

HEAL_TRIES = 5
"""How often hosts fetch again when their peers serve different rounds."""
COPY_SECONDS = 30.0  # limit for a trainer to finish its step and copy its inner optimizer
COPY_TRIES = 2  # per source: a request of another joiner may have replaced the copies of some hosts meanwhile


class HostGroup:
    """All hosts of an island. One thread at a time calls it, except `drop_group`, `ordered`, `granted` and `meet`.

    - `others`: the other hosts, by number
    - `wants_inner`: this island has no usable inner optimizer of its own
    """

    def __init__(self, own: HostWorker, others: Sequence[RemoteHost] = (), wants_inner: bool = False):
        self.timeouts, self.count = own.timeouts, own.count
        self.wants_inner, self._has_inner = wants_inner, False
        self._own, self._others = own, others
        self._met: tuple[Any, ...] = ()

    @property
    def side(self) -> OuterSnapshot:
        return self._own.side

    @property
    def link(self) -> int:
        """Return the level of the rate of host 0's link; 0: unknown. The links of the other hosts count as equal."""
        return self._own.rate.level

    @property
    def dial(self) -> Dial:
        return self._own.server.paths.dial

    def meet(self, name: str, addresses: Mapping[str, tuple[str, ...]], relay: str) -> None:
        """Follow the addresses of a view, by the names of islands; `name`: of this one; `relay`: of the coordinator."""
        met = addresses.get(name, ()), [hosts for other, hosts in addresses.items() if other != name], relay
        if met != self._met and len(met[0]) > len(self._others):
            self._met = met
            self._own.meet(*met)
            self._send("meet", *met)

    def ordered(self, order: TrainerCommand | None) -> None:
        """Send a command to the trainers of all hosts (None: take a step)."""
        self._own.ordered(order)
        self._send("ordered", None if order is None else [type(order).__name__, *order])

    def granted(self, first: int | None) -> None:
        """Send the first example of the next batch to all hosts (None: no example is leased)."""
        self._send("granted", first)

    def store_messages(self, number: int, messages: Messages) -> None:
        """Store host 0's messages of a round; return when all hosts have theirs."""
        self._own.store_messages(number, messages)
        for host in self._others:
            host.await_messages()

    def reduce(self, action: Reduce, name: str) -> str:
        """Average a fragment, prepare its outer step, return the digest of all hosts. Raises GroupFailed, NotFinite."""
        members = [list(member) for member in action.members]
        arguments = [action.key, action.round, members, list(action.weights), list(action.parts), name]
        asked = [host.request("reduce", arguments, failed=self.drop_group) for host in self._others]
        failures: list[Exception] = []
        digests = [self._attempt(lambda: self._own.reduce(action, name), failures)]
        if failures and isinstance(failures[0], GroupFailed):
            self.drop_group()  # otherwise the others would wait for their timeout
        digests += [self._attempt(lambda answer=answer: self._value_of(answer), failures) for answer in asked]
        if failures:
            self.discard(action.key)
            raise failures[0]
        return joint_digest(digests)

    def commit(self, key: str, outer: OuterRecord) -> None:
        self._own.commit(key, outer)
        self._send("commit", key, outer.to_json())

    def discard(self, key: str) -> None:
        self._own.discard(key)
        self._send("discard", key)

    def drop_group(self) -> None:
        self._send("drop_group")
        self._own.drop_group()

    def publish(self, outer: OuterRecord) -> None:
        """Serve the unchanged state under another record."""
        self._own.publish(outer)
        self._send("publish", outer.to_json())

    def heal(self, sources: Sequence[Peer], settled: bool) -> FetchedState:
        """Fetch the state of peers without replacing the own state. Raises TransferFailed.

        Chunks have hashes, but the source computes them from its present memory. The digest in the record was agreed
        when the fleet committed the round, over the arrays of all hosts. It detects a source whose memory has changed
        since. Then each source is tried alone.

        - `settled`: wait a few seconds for the end of the round that the peers are making
        """
        until = time.monotonic() + self.timeouts.heal
        try:
            return self._fetch(sources, settled)
        except DigestMismatch as error:
            complaints = [str(error)]
        for source in sources if len(sources) > 1 else ():
            if time.monotonic() >= until:
                break
            try:
                return self._fetch([source], settled)
            except TransferFailed as error:
                complaints.append(str(error))
        raise TransferFailed("; ".join(complaints))

    def _fetch(self, sources: Sequence[Peer], settled: bool) -> FetchedState:
        """Fetch the state of peers, with the same record on all hosts, and check its digest. Raises TransferFailed."""
        wire = [list(source) for source in sources]
        found: dict[int, FetchedState] = {}
        for _ in range(HEAL_TRIES):
            newest = max((each.outer for each in found.values()), key=lambda outer: outer.round, default=None)
            current = {number for number, each in found.items() if each.outer == newest}
            behind = set(range(len(self._others) + 1)) - current
            asked = [
                (host.number, host.request("fetch", [wire, settled])) for host in self._others if host.number in behind
            ]
            if 0 in behind:
                found[0] = self._own.fetch(sources, settled)
            for number, answer in asked:
                record, digest, is_settled = self._value_of(answer)
                found[number] = FetchedState(OuterRecord.from_json(record), digest, is_settled)
            if all(each.outer == found[0].outer for each in found.values()):
                outer, digest = found[0].outer, joint_digest([each.digest for _, each in sorted(found.items())])
                if digest != outer.digest:
                    names = ", ".join(source.name for source in sources)
                    raise DigestMismatch(
                        f"the arrays of round {outer.round} of {names} have the digest {digest}, their record has "
                        f"{outer.digest}"
                    )
                return FetchedState(outer, digest, all(each.settled for each in found.values()))
        rounds = sorted({each.outer.round for each in found.values()})
        raise DigestMismatch(f"the hosts of this island fetched different states, of rounds {rounds}")

    def install(self, outer: OuterRecord) -> bool:
        """Adopt the fetched state, and serve it; return as `takes_inner`."""
        self._own.install(outer)
        self._send("install", outer.to_json())
        return self.takes_inner()

    def inherit(self, sources: Sequence[Peer]) -> None:
        """Fetch a peer's inner optimizer if it is wanted: for all hosts, or for none."""
        self._has_inner = False
        self._has_inner = self.wants_inner and any(self._inherit(source) for source in sources)

    def _inherit(self, source: Peer) -> bool:
        """Return whether all hosts have the shards of their counterparts, copied after the same step."""
        for _ in range(COPY_TRIES):
            try:
                call(source.hosts[0], self._own.token, {"kind": "inner"}, COPY_SECONDS, self.dial)
                asked = [host.request("inherit", [source.hosts[host.number]]) for host in self._others]
                steps = {self._own.inherit(source.hosts[0]), *(self._value_of(answer) for answer in asked)}
            except (PeerUnreachable, RequestRejected, TransferFailed):
                return False
            if len(steps) == 1:
                return True
        return False

    def takes_inner(self) -> bool:
        """Return whether the trainers adopt the fetched inner optimizer with the next command."""
        has_inner, self._has_inner = self._has_inner, False
        self.wants_inner = self.wants_inner and not has_inner
        return has_inner

    def show(self, inner: InnerOptimizerState) -> None:
        """Serve host 0's shards of the inner optimizer."""
        self._own.show(inner)

    def await_copies(self, step: int) -> None:
        """Wait until the other hosts serve their shards of this step too. Raises RequestRejected."""
        for host in self._others:
            host.await_copy(step, COPY_SECONDS)

    def inherited(self) -> InnerOptimizerState | None:
        return self._own.inherited()

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer a message of another host. Raises RequestRejected."""
        for host in self._others:
            if host.number == message.get("host"):
                return host.handle(message)
        raise RequestRejected("this island has no such host")

    def close(self) -> None:
        for host in self._others:
            host.close()
        self._own.close()

    def _send(self, command: str, *arguments: Any) -> None:
        for host in self._others:
            host.send(command, list(arguments))

    def _value_of(self, answer: Future[dict[str, Any]]) -> Any:
        """Return the value of a host's answer, or raise its error; add its bytes to the island's count."""
        result = answer.result()
        self.count.sent += result["sent"]
        self.count.received += result["received"]
        return result["value"]

    @staticmethod
    def _attempt(work: Callable[[], str], failures: list[Exception]) -> str:
        try:
            return work()
        except (GroupFailed, NotFinite) as error:
            failures.append(error)
            return ""


def joint_digest(digests: Sequence[str]) -> str:
    """Return the digest of an island's host digests in host order; for one host, its own digest."""
    if len(digests) == 1:
        return digests[0]
    return blake2b("".join(digests).encode(), digest_size=16).hexdigest()


class Recovery:
    """Restarts of a trainer whose island has diverged.

    - `restart(inherits)`: restarts the trainer with the inherited inner optimizer, or with its own
    - `is_tried`: whether the trainer was restarted since the island's last contribution
    - `in_thread`: runs slow work in a thread
    """

    def __init__(
        self, worker: HostGroup, restart: Callable[[bool], None], in_thread: Callable[[Callable[[], None]], object]
    ):
        self._worker, self._restart, self._in_thread = worker, restart, in_thread
        self.is_tried = self._has_inherited = False

    def contributed(self) -> None:
        """Note that the island has contributed to a round: its message was no outlier."""
        self.is_tried = self._has_inherited = False

    def begin(self, peers: Sequence[Peer]) -> None:
        """Restart the island, which has diverged, from the state of `peers`, which have not.

        The island inherits only once before its next contribution, because each copy interrupts a peer.
        """
        self.is_tried = True
        self._restart(False)
        if peers and not self._has_inherited:
            self._has_inherited = self._worker.wants_inner = True
            self._in_thread(lambda: self._inherit(peers))

    def _inherit(self, peers: Sequence[Peer]) -> None:
        self._worker.inherit(peers)
        if self._worker.takes_inner():
            self._restart(True)
