"""The cost of a fleet's size: bytes and processor time of headers, views and announcements.

    python -m benchmarks.fleet_size --members 4 16 64 256

The coordinator is the real one, in a process of its own. The members are real state machines (`protocol.member`) with
real clients, all in this process: they make rounds whose reduces are simulated.
"""

import argparse
import math
import multiprocessing
import os
import time
from dataclasses import asdict
from queue import Queue

from gregale.distributed.agreement import canonical, to_text
from gregale.islands.driver import ViewPoller
from gregale.islands.protocol import messages as m
from gregale.islands.protocol.member import Identity, Member
from gregale.islands.protocol.messages import Rules, Timing, seed
from gregale.islands.transport.coordinator import CoordinatorClient
from gregale.islands.transport.lighthouse import Lighthouse
from gregale.islands.transport.server import Handler

TOKEN = b"a token of the fleet"
PATIENCE = 3600.0
IDLE_SECONDS = 12.0
TERMS = 100  # keys that must agree: as many as a run's configuration has, with 3 kB
TIMING = Timing(heartbeat_seconds=30.0, join_seconds=PATIENCE, hold_seconds=PATIENCE, grace_seconds=PATIENCE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--members", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| members | header, bytes | view, bytes | coordinator sends a round, bytes | coordinator, ms a round "
          "| heartbeats, ms a second | member, ms a view | announcements at once | failed requests |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for count in options.members:
        print(Fleet(count).measured(options.rounds), flush=True)


class Fleet:
    """Islands that make their rounds together, without faults."""

    def __init__(self, count: int):
        context = multiprocessing.get_context("spawn")
        addresses: multiprocessing.Queue = context.Queue()
        self._sent = context.Value("q", 0)
        arguments = addresses, self._sent
        self._process = context.Process(target=run_coordinator, args=arguments, daemon=True)
        self._process.start()
        address, self._answers = addresses.get(), Queue()
        agreement = to_text({f"model.a_key_{number}": f"value {number}" for number in range(TERMS)})
        self._rules = Rules(minimum=count, start=count)
        names = [f"island-{number:03}" for number in range(count)]
        self._members = [self._member(name, agreement) for name in names]
        self._pollers = [self._poller(number, CoordinatorClient(address, name, TOKEN, TIMING))
                         for number, name in enumerate(names)]  # fmt: skip
        self.failed = self.headers = self.announced = self.views = self._largest_view = 0
        self.member_seconds = 0.0

    def _member(self, name: str, agreement: str) -> Member:
        session, address = os.urandom(8).hex(), f"10.8.0.{name[-3:]}:29511/{name}:{os.urandom(8).hex()}"
        identity = Identity(name, session, agreement, "1.0", (address,))
        return Member(identity, seed("digest of the seed"), TIMING, self._rules)

    def _poller(self, number: int, coordinator: CoordinatorClient) -> ViewPoller:
        def seen(view) -> None:
            self._answers.put((number, m.ViewReceived(view), time.thread_time()))

        def failed(reason: str) -> None:
            self._answers.put((number, m.ViewFailed(reason), 0.0))

        return ViewPoller(coordinator, seen, failed, print, print)

    def measured(self, rounds: int) -> str:
        for number in range(len(self._members)):
            self._handle(number, m.Tick(time.monotonic()))
        self._await_views()  # the fleet begins
        self._round()  # all connections are open after it
        began = self._coordinator_seconds()
        time.sleep(IDLE_SECONDS)
        idle = (self._coordinator_seconds() - began) / IDLE_SECONDS  # of heartbeats, a second
        self.headers = self.views = self.member_seconds = self._largest_view = 0
        before, sent, began = self._coordinator_seconds(), self._sent.value, time.monotonic()
        for _ in range(rounds):
            self._round()
        # The members of all islands share this machine, so that a round takes longer than in a fleet.
        seconds = (self._coordinator_seconds() - before - idle * (time.monotonic() - began)) / rounds
        member = self.member_seconds / self.views / len(self._members)
        self._process.kill()
        sent = (self._sent.value - sent) // rounds
        return (f"| {len(self._members)} | {self.headers:,} | {self._largest_view:,} | {sent:,} "
                f"| {1e3 * seconds:.1f} | {1e3 * idle:.1f} | {1e3 * member:.1f} "
                f"| {self.announced:,} | {self.failed} |")  # fmt: skip

    def _round(self) -> None:
        self.announced = 0
        number = self._members[0].outer.round
        for each in range(len(self._members)):
            self._handle(each, m.RoundDue())
        for each in range(len(self._members)):
            self._handle(each, m.MessageReady(number, 1e5 + each, 10 * number, norm=1e-3 * math.sqrt(each + 1)))
        while self._members[0].outer.round == number:
            self._await_views()

    def _await_views(self) -> None:
        """Pass the answers of one view to all members."""
        sent = self._sent.value
        seen = {}
        while len(seen) < len(self._members):
            number, event, seconds = self._answers.get()
            if isinstance(event, m.ViewFailed):
                self.failed += 1
                self._handle(number, event)
                self._handle(number, m.Tick(self._members[number].next_tick()))
            else:
                seen[number] = event
                self.member_seconds += seconds
        self._largest_view = max(self._largest_view, (self._sent.value - sent) // len(self._members))
        self.views += 1
        for number, event in sorted(seen.items()):
            began = time.process_time()
            actions = self._members[number].handle(event)
            self.member_seconds += time.process_time() - began
            for action in actions:
                self._carry_out(number, action)

    def _handle(self, number: int, event: m.Event) -> None:
        for action in self._members[number].handle(event):
            self._carry_out(number, action)

    def _carry_out(self, number: int, action: m.Action) -> None:
        if isinstance(action, m.RequestView):
            self.headers = max(self.headers, len(canonical(asdict(action.header))))
            self._pollers[number].ask(action.header, action.needed)
        elif isinstance(action, m.AnnounceRound):
            self.announced += len(action.addresses)
        elif isinstance(action, m.Reduce):
            self._handle(number, m.Reduced(action.key, f"digest of round {action.round}"))

    def _coordinator_seconds(self) -> float:
        with open(f"/proc/{self._process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def run_coordinator(addresses: multiprocessing.Queue, sent) -> None:
    send_all = Handler._send_all

    def counted(handler: Handler, content: bytes) -> None:
        with sent.get_lock():
            sent.value += len(content)
        send_all(handler, content)

    Handler._send_all = counted  # type: ignore[method-assign]
    lighthouse = Lighthouse("127.0.0.1:0", TOKEN)
    addresses.put(lighthouse.address)
    time.sleep(PATIENCE)


if __name__ == "__main__":
    main()
