"""The lighthouse: the coordinator's rules (`protocol.membership`) behind an authenticated server.

Clients (`coordinator`) send requests to the server; a request to `ALIAS` returns its random name. A heartbeat is
answered at once; a view request waits in its thread for its view. The TLS handshake refuses everybody else.
"""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gregale.distributed.signing import canonical
from gregale.errors import UserError
from gregale.islands.protocol.membership import Ask, Formed, Membership
from gregale.islands.protocol.news import News
from gregale.islands.transport.client import RequestRejected
from gregale.islands.transport.listener import RateLimitedLines
from gregale.islands.transport.server import Server

ALIAS = "lighthouse"
TICK_SECONDS = 0.05
LONGEST_NAME, LONGEST_REASON, LONGEST_WAIT_SECONDS = 100, 300, 10**6
CHANGES_AT_ONCE, SECONDS_PER_CHANGE = 100, 5.0  # lines about islands that come and go
FIRST_IDS = 2**48  # the range of a coordinator's random first id


@dataclass(frozen=True)
class Quorum:
    """The conditions for a view: see `protocol.membership`."""

    minimum: int
    join_seconds: float
    heartbeat_seconds: float


@dataclass(eq=False)
class Waiting:
    """The thread of a view request that waits for its answer."""

    answered: threading.Event = field(default_factory=threading.Event)
    reply: dict | bytes = field(default_factory=dict)


class Lighthouse:
    """A running coordinator. `address` is `host:port` for `CoordinatorClient`."""

    def __init__(self, bind: str, token: bytes, quorum: Quorum, say: Callable[[str], None]):
        self._membership = Membership(
            quorum.minimum, quorum.join_seconds, quorum.heartbeat_seconds, 1 + secrets.randbelow(FIRST_IDS)
        )
        self._news, self._say = News(quorum.heartbeat_seconds), say
        self._say_change = RateLimitedLines(say, CHANGES_AT_ONCE, SECONDS_PER_CHANGE)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._waiting: dict[Ask, Waiting] = {}
        self._server = Server(
            bind, token, self._take, lambda: {"recipient": self._server.recipient}, say, key="bind", alias=ALIAS
        )
        self.address = f"{self._server.host}:{self._server.port}"
        threading.Thread(target=self._run, name="gregale-lighthouse", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._server.close()
        with self._lock:
            waiting = list(self._waiting.values())
        for each in waiting:
            each.answered.set()

    def _take(self, message: dict) -> dict | bytes:
        name, session = text_of(message, "name", LONGEST_NAME), text_of(message, "session", LONGEST_NAME)
        if message.get("kind") == "ask":
            return self._ask(name, session, message)
        with self._lock:
            if message.get("kind") == "beat":
                self._membership.beat(name, session, time.monotonic())
                self._report(name, session, message)
            elif message.get("kind") == "leave":
                self._membership.leave(name, session)
                self._news.leave(name)
            else:
                raise RequestRejected("unknown message")
            self._tick()
        return {}

    def _report(self, name: str, session: str, message: dict) -> None:
        round, stalled = message.get("round"), text_of(message, "stalled", LONGEST_REASON)
        if type(round) is int and self._membership.healthy.get(name) == session:
            self._tell(self._news.report(name, round, stalled, time.monotonic()), self._say)

    def _ask(self, name: str, session: str, message: dict) -> dict | bytes:
        number, seconds, header = message.get("number"), message.get("seconds"), message.get("header")
        if not (isinstance(number, int) and isinstance(seconds, int | float) and isinstance(header, dict)):
            raise RequestRejected("a question has a number, a header and seconds")
        if not 0 <= seconds <= LONGEST_WAIT_SECONDS:
            raise RequestRejected(f"a question waits for at most {LONGEST_WAIT_SECONDS} seconds")
        now, waiting = time.monotonic(), Waiting()
        ask = Ask(name, session, number, {**header, "name": name}, now + seconds)
        with self._lock:
            self._waiting[ask] = waiting
            self._membership.ask(ask, now)
            round = header.get("round")
            if type(round) is int and self._membership.healthy.get(name) == session:
                self._tell(self._news.note(round, now), self._say)
            self._tick()
        waiting.answered.wait()
        return waiting.reply

    def _tick(self) -> None:
        """Send the answers that are due, and print the resulting lines."""
        now, refused = time.monotonic(), set[str]()
        replies: dict[Formed, bytes] = {}
        for answer in self._membership.tick(now):
            waiting = self._waiting.pop(answer.ask)
            if (view := answer.view) is not None:
                if view not in replies:  # one text for all its members
                    headers = [ask.header for ask in view.asks]
                    replies[view] = canonical({"view": {"id": view.id, "headers": headers}})
                waiting.reply = replies[view]
            elif answer.refused:
                waiting.reply = {"refused": answer.refused}
                refused.add(answer.ask.name)
            waiting.answered.set()
        self._tell([f"A second island with the name {name} was refused." for name in refused], self._say_change)
        self._tell(self._news.changes(self._membership.healthy, now), self._say_change)
        self._tell(self._news.stall(self._membership.pending, now), self._say)

    def _tell(self, lines: list[str], say: Callable[[str], None]) -> None:
        for line in lines:
            say(line)

    def _run(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            with self._lock:
                self._tick()


def serve(bind: str, token: bytes, quorum: Quorum, say: Callable[[str], None] = lambda line: None) -> Lighthouse:
    """Start a coordinator in threads of this process that listens at `bind` (`host:port`; port 0: any).

    - `say`: receives the lines for its user

    Raises UserError if it cannot listen at the address.
    """
    host, colon, port = bind.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 2**16):
        raise UserError(f"bind is {bind!r}; it has to be HOST:PORT, as 127.0.0.1:29510.")
    return Lighthouse(bind, token, quorum, say)


def text_of(message: dict, key: str, longest: int) -> str:
    """Return a text of a message, in which "?" replaces each unprintable character."""
    text = message.get(key)
    if not isinstance(text, str) or len(text) > longest:
        raise RequestRejected(f"a message has {key!r}, a text of at most {longest} characters")
    return "".join(each if each.isprintable() else "?" for each in text)
