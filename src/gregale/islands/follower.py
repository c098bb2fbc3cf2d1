"""A follower: host 1 or higher of an island, which executes the commands of host 0's `HostGroup` and decides nothing.

Its trainer calls the same methods as the trainer of host 0 calls on `Driver`, and receives the same commands and
batches in the same order. If host 0 is lost, it waits until `gregale.distributed.liveness` ends the process.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue
from threading import Thread
from typing import Any

from gregale.errors import UserError
from gregale.islands.host_connection import HostConnection
from gregale.islands.host_worker import HostWorker, NotFinite, OuterSnapshot
from gregale.islands.inner_optimizer_state import InnerOptimizerState
from gregale.islands.protocol.headers import OuterRecord, Peer
from gregale.islands.protocol.messages import Reduce
from gregale.islands.trainer_command import Down, RoundPacing, TrainerCommand, from_wire
from gregale.islands.transport.group import GroupFailed
from gregale.islands.transport.transfer import TransferFailed


class Follower:
    """A host that receives commands from host 0 through `link` and passes them to this host's `worker`."""

    def __init__(self, worker: HostWorker, link: HostConnection, pace: RoundPacing):
        self.pace, self.side = pace, worker.side
        self._worker, self._link = worker, link
        self._orders: Queue[tuple[TrainerCommand | None, OuterSnapshot] | UserError] = Queue()
        self._grants: Queue[int | None] = Queue()
        threads = (ThreadPoolExecutor(1, name) for name in ("copying", "exchange", "healing"))
        self._copying, self._exchange, self._healing = threads
        self._is_closed = False

    def start(self) -> None:
        Thread(target=lambda: self._guarded(self._listen), daemon=True, name="follower").start()

    # Methods that the trainer calls, as on a driver.

    def order(self, starved: bool = False) -> TrainerCommand | None:
        """Return the next command of host 0; wait for it."""
        del starved
        found = self._orders.get()
        if isinstance(found, UserError):
            raise found
        order, self.side = found
        return order

    def take(self) -> int | None:
        """Return the first example of the next batch."""
        return self._grants.get()

    def message_sent(self, number: int, fetch_down: Callable[[], Down], used: int) -> None:
        """Store this host's messages of a round."""
        del used

        def store(found: Down) -> None:
            self._worker.store_messages(number, found.messages)
            self._link.send({"took": True})

        def down() -> None:  # not in the thread of reduces, as on host 0
            self._exchange.submit(self._guarded, partial(store, fetch_down()))

        self._copying.submit(self._guarded, down)

    is_early = False
    """Host 0 waits for the end of a step if messages are handed over early, and the others for its commands."""

    def stepped(self) -> None:
        """Do nothing: host 0 counts the steps."""

    def to_save(self, batches: int) -> dict[str, Any]:
        """Return empty values: host 0 counts steps and examples, and holds the leases."""
        del batches
        return {"steps": 0, "holder": "", "used": 0}

    def used(self, batches: int) -> int:
        """Return 0: host 0 counts the examples and reports them to the fleet."""
        del batches
        return 0

    def shown(self, inner: InnerOptimizerState) -> None:
        """Serve this host's shards of the inner optimizer, and report that to host 0."""
        self._worker.show(inner)
        self._link.send({"shown": inner.step})

    def inherited(self) -> InnerOptimizerState | None:
        return self._worker.inherited()

    def diverged(self) -> bool:
        """Return False: host 0 decides, and a command follows."""
        return False

    def leave(self) -> None:
        """Do nothing: host 0 leaves, and a `Finish` command follows."""

    def confirm(self) -> None:
        """Do nothing: host 0 waits."""

    def close(self) -> None:
        self._is_closed = True
        self._link.close()
        for threads in (self._copying, self._exchange, self._healing):
            threads.shutdown(wait=False, cancel_futures=True)
        self._worker.close()

    # Commands of host 0.

    def _listen(self) -> None:
        for message in self._received():
            arguments = message["with"]
            match message["do"]:
                case "ordered":
                    order = from_wire(arguments[0])
                    self._worker.ordered(order)
                    self._orders.put((order, self._worker.side))
                case "granted":
                    self._grants.put(arguments[0])
                case "reduce":
                    self._exchange.submit(self._guarded, partial(self._answer, message, self._reduce))
                case "fetch":
                    self._healing.submit(self._guarded, partial(self._answer, message, self._fetch))
                case "inherit":
                    self._healing.submit(self._guarded, partial(self._answer, message, self._worker.inherit))
                case "commit":
                    self._worker.commit(arguments[0], OuterRecord.from_json(arguments[1]))
                case "install":
                    self._worker.install(OuterRecord.from_json(arguments[0]))
                case "publish":
                    self._worker.publish(OuterRecord.from_json(arguments[0]))
                case "discard":
                    self._worker.discard(arguments[0])
                case "meet":
                    self._worker.meet(*arguments)
                case "drop_group":
                    self._worker.drop_group()

    def _received(self) -> Iterator[dict[str, Any]]:
        while (messages := self._link.receive()) is not None:
            yield from messages

    def _reduce(self, key: str, number: int, members: list, weights: list[float], parts: list[int], name: str) -> str:
        return self._worker.reduce(Reduce(key, number, _peers(members), tuple(weights), tuple(parts)), name)

    def _fetch(self, sources: list, settled: bool) -> Any:
        found = self._worker.fetch(_peers(sources), settled)
        return found.outer.to_json(), found.digest, found.settled

    def _answer(self, message: dict[str, Any], work: Callable[..., Any]) -> None:
        count = self._worker.count
        before = count.sent, count.received
        try:
            value = work(*message["with"])
        except (GroupFailed, NotFinite, TransferFailed) as error:
            self._link.send({"ask": message["ask"], "failed": str(error), "error": type(error).__name__})
            return
        sent, received = count.sent - before[0], count.received - before[1]
        self._link.send({"ask": message["ask"], "value": value, "sent": sent, "received": received})

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run `work`; an error in a thread ends the run, because otherwise the run would wait forever."""
        try:
            work()
        except BaseException as error:
            if not self._is_closed:
                self._orders.put(UserError(f"islands: {type(error).__name__}: {error}"))
                raise


def _peers(wire: list) -> tuple[Peer, ...]:
    return tuple(Peer(name, session, tuple(hosts)) for name, session, hosts in wire)
