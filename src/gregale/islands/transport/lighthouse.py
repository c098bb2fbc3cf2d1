"""The lighthouse: the coordinator's rules (`protocol.membership`) behind an authenticated server.

Clients (`coordinator`) send requests to the server. A heartbeat is answered at once, by the last tick. A view request
waits in its thread for its view, or for the time after which the client repeats it. The TLS handshake refuses everybody
else.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from zlib import compress

from gregale.atomic_files import os_error_text, write_bytes
from gregale.distributed.agreement import canonical
from gregale.errors import UserError
from gregale.islands.protocol.membership import MOST_RUNS, Ask, Formed, Membership, Record
from gregale.islands.protocol.messages import FORMAT, pack, to_texts
from gregale.islands.protocol.stalls import News, RunningTime
from gregale.islands.transport.client import OUTWARDS, PeerUnreachable, RequestRejected, ask_status
from gregale.islands.transport.listener import RateLimitedLines
from gregale.islands.transport.server import Endpoint, Server
from gregale.islands.transport.tls import tls_contexts

# The recipient of requests, and the name of a coordinator's key: any of the fleet, also one that has started again.
NAME = "lighthouse"
TICK_SECONDS = 0.05
BURST_SECONDS = 0.005  # the requests of this time are handled by one tick, because a tick looks at all islands
LONGEST_NAME, LONGEST_REASON, LONGEST_SECONDS = 100, 300, 10**6
CHANGES_AT_ONCE, SECONDS_PER_CHANGE = 100, 5.0  # lines about islands that come and go
OTHER_FORMAT = "it has another version of Gregale, with other messages: install the same one everywhere"
MOST_RELAYS = 512
REACH_SECONDS, REACH_TRIES, AGAIN_SECONDS = 1.0, 2, 60.0
REACH_THREADS, MOST_HOSTS = 16, 1024  # for the hosts of an island; number of these
FIRST_IDS = 2**48  # the range of a coordinator's random first id


class Lighthouse:
    """A coordinator in threads of this process, from the start until `close`.

    Its clock stands still while this process is stopped: the silence of islands then is no silence of theirs. Raises
    UserError if it cannot listen at the address.

    - `bind`: `host:port`; port 0: any
    - `say`: receives the lines for its user
    - `kept`: the file for the last states of complete runs, which outlives the process; None: they do not
    - `address`: `host:port` for `CoordinatorClient`
    """

    def __init__(
        self, bind: str, token: bytes, say: Callable[[str], None] = lambda line: None, kept: Path | None = None
    ):
        host, _, port = bind.rpartition(":")
        if not (host and port.isascii() and port.isdecimal() and int(port) < 2**16):
            raise UserError(f"bind is {bind!r}; it has to be HOST:PORT, as 127.0.0.1:29510.")
        self._kept, self._failure, complete = kept, "", read_records(kept) if kept else {}
        self._membership, self._time = Membership(1 + secrets.randbelow(FIRST_IDS), complete), RunningTime()
        self._news, self._say, self._revoked = News(), say, tls_contexts(token).revoked
        self._say_change = RateLimitedLines(say, CHANGES_AT_ONCE, SECONDS_PER_CHANGE)
        self._lock, self._closed, self._asked = threading.Lock(), threading.Event(), threading.Event()
        self._waiting: dict[Ask, Future[dict | bytes]] = {}
        endpoint = Endpoint(bind, key="bind", recipient=NAME)
        self._server = Server(endpoint, token, self._take, complain=say, relays=MOST_RELAYS)
        self._reached = ReachedHosts(token)
        self.address = f"{self._server.host}:{self._server.port}"
        threading.Thread(target=self._run, name="gregale-lighthouse", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._server.close()
        with self._lock:
            for answer in self._waiting.values():
                answer.set_result({})
            self._waiting.clear()

    def _take(self, message: dict) -> dict | bytes:
        if message.get("format") != FORMAT:
            raise RequestRejected(OTHER_FORMAT)
        self._revoked.take(message.get("revocations", {}))
        news = {} if message.get("revoked") == self._revoked.digest() else {"revocations": self._revoked.to_json()}
        if message.get("kind") == "fleet":
            with self._lock:
                return compress(canonical({"headers": pack(self._membership.running), **news}), 1)
        name, session = text_of(message, "name", LONGEST_NAME), text_of(message, "session", LONGEST_NAME)
        run = text_of(message, "run", LONGEST_NAME)
        with self._lock:
            self._record(run, message.get("record"))
        if message.get("kind") == "ask":
            return self._ask(name, session, run, message)
        with self._lock:
            if message.get("kind") == "beat":
                self._beat(name, session, message)
            elif message.get("kind") == "leave":
                self._membership.leave(name, session)
                self._news.leave(name)
                self._asked.set()
            else:
                raise RequestRejected("unknown message")
            if self._membership.has_answers:
                self._tick()
            told = {"hears": self._membership.hears, "term": self._membership.term}
            told |= {"newest": self._membership.newest, "behind": self._membership.behind}
            told |= {"record": self._membership.complete.get(run)}
            return told | {"held": self._membership.held(name), **news}

    def _record(self, run: str, last: object) -> None:
        """Record the last state of a run that an island tells, on the disk before anybody hears of it."""
        match last:
            case None:
                return
            case [int(rounds), str(state)] if run and len(state) <= LONGEST_NAME:
                new = rounds, state
            case _:
                raise RequestRejected("the record of a complete run has its rounds and a digest")
        if run in self._membership.complete:
            return
        try:
            self._membership.record(run, kept_record(self._kept, run, new) if self._kept else new)
        except (OSError, UserError) as error:
            before, self._failure = self._failure, f"A complete run cannot be recorded: {os_error_text(error)}"
            self._tell([self._failure] if self._failure != before else [], self._say)

    def _beat(self, name: str, session: str, message: dict) -> None:
        round, stalled, now = message.get("round"), text_of(message, "stalled", LONGEST_REASON), self._time()
        if type(round) is not int:
            raise RequestRejected("a heartbeat has a round")
        seconds, here, met = seconds_of(message, "heartbeat_seconds"), message.get("here"), message.get("met")
        if not (isinstance(here, bool) and isinstance(met, bool)):
            raise RequestRejected("a heartbeat says whether this coordinator is chosen, and heard")
        self._membership.beat(name, session, seconds, round, now, here, met)
        if self._membership.healthy.get(name) == session:
            self._tell(self._news.report(name, round, stalled, now), self._say)

    def _ask(self, name: str, session: str, run: str, message: dict) -> dict | bytes:
        number, needed, header = message.get("number"), message.get("needed"), message.get("header")
        term, round = message.get("term"), message.get("round")
        states = tuple(text_of(message, key, LONGEST_NAME) for key in ("state", "recorded"))
        if not (isinstance(number, int) and isinstance(needed, int) and isinstance(header, dict)):
            raise RequestRejected("a view request has a number, the needed members and a header")
        if not isinstance(term, int) or type(round) is not int:
            raise RequestRejected("a view request has a term and a round")
        if not all(isinstance(each, str) for each in header.values()):
            raise RequestRejected("the values of a header are JSON texts")
        hold, gather, heartbeat = (seconds_of(message, f"{key}_seconds") for key in ("hold", "gather", "heartbeat"))
        until = time.monotonic() + hold
        if "hosts" in header:
            if (found := self._reached(name, session, header["hosts"], hold)) is None:
                return {"held": True}
            header["hosts"] = found
        header |= to_texts({"name": name})
        ask = Ask(name, session, number, header, needed, gather, heartbeat, term, round, run, *states)
        answer = Future[dict | bytes]()
        with self._lock:
            self._waiting[ask] = answer
            self._membership.ask(ask, self._time())
        self._asked.set()
        with suppress(TimeoutError):
            return answer.result(max(until - time.monotonic(), 0.0))
        return {"held": True}

    def _tick(self) -> None:
        """Send the answers that are due, and print the resulting lines."""
        now, refused, term = self._time(), set[str](), self._membership.term
        replies: dict[Formed, bytes] = {}
        for answer in self._membership.tick(now, self._time.stopped):
            reply: dict | bytes = {"refused": answer.refused, "term": term}
            if (view := answer.view) is not None:
                if view not in replies:  # one text for all its members
                    headers = [ask.header for ask in view.asks]
                    made = {"id": view.id, "stamp": view.stamp, "headers": pack(headers)}
                    replies[view] = compress(canonical({"view": made, "term": term}), 1)
                reply = replies[view]
            elif answer.refused:
                refused.add(answer.ask.name)
            self._waiting.pop(answer.ask).set_result(reply)
        self._tell([f"A second island with the name {name} was refused." for name in refused], self._say_change)
        heartbeat_seconds = self._membership.heartbeat_seconds
        self._tell(self._news.changes(self._membership.healthy, now, heartbeat_seconds), self._say_change)
        self._tell(self._news.stall(self._membership.pending, now), self._say)

    def _tell(self, lines: list[str], say: Callable[[str], None]) -> None:
        for line in lines:
            say(line)

    def _run(self) -> None:
        while not self._closed.wait(BURST_SECONDS):
            self._asked.wait(TICK_SECONDS)
            self._asked.clear()
            with self._lock:
                self._tick()


class ReachedHosts:
    """Replaces the addresses of hosts that the coordinator does not reach: these only connect outwards.

    It tries once for each process of an island, and again after a while if it did not reach all, as of a busy host. It
    makes one try of a name at a time.
    """

    def __init__(self, token: bytes):
        self._token, self._lock = token, threading.Lock()
        self._known: dict[str, tuple[str, str, str, float]] = {}  # by name: session, addresses, found ones, when
        self._tries: dict[str, threading.Thread] = {}  # in progress, by name

    def __call__(self, name: str, session: str, hosts: str, seconds: float) -> str | None:
        """Return the JSON text of the addresses of an island's hosts, from such a text of its header.

        Return None if that takes longer than `seconds`, or if another process's hosts were tried meanwhile: ask again.
        Raises RequestRejected for too many hosts.
        """
        try:
            addresses = [str(each) for each in json.loads(hosts)]
        except (ValueError, TypeError, RecursionError):
            return hosts  # members see what it is
        if len(addresses) > MOST_HOSTS:
            raise RequestRejected(f"its header has {len(addresses)} hosts; an island has at most {MOST_HOSTS}")
        with self._lock:
            found, when = self._found(name, session, hosts)
            if found is None or (OUTWARDS in found and time.monotonic() - when > AGAIN_SECONDS):
                if name not in self._tries:
                    arguments = name, session, hosts, addresses
                    thread = threading.Thread(target=self._try, args=arguments, name="gregale-reach", daemon=True)
                    thread.start()
                    self._tries[name] = thread
                trying = self._tries[name]
        if found is None:
            trying.join(seconds)
            found, _ = self._found(name, session, hosts)
        return found

    def _found(self, name: str, session: str, hosts: str) -> tuple[str | None, float]:
        *of, found, when = self._known.get(name, ("", "", "", 0.0))
        return (found, when) if of == [session, hosts] else (None, 0.0)

    def _try(self, name: str, session: str, hosts: str, addresses: list[str]) -> None:
        found = hosts  # if an error ends the tries
        try:
            with ThreadPoolExecutor(REACH_THREADS) as threads:
                found = to_texts({"": list(threads.map(self._checked, addresses))})[""]
        finally:
            with self._lock:
                self._known[name] = session, hosts, found, time.monotonic()
                del self._tries[name]

    def _checked(self, address: str) -> str:
        recipient = address.partition("/")[2]
        for _ in range(REACH_TRIES if recipient else 0):
            try:
                ask_status(address, self._token, REACH_SECONDS)
            except RequestRejected:
                return address
            except (PeerUnreachable, HTTPException):  # the latter: no port is in the address
                continue
            return address
        return f"{OUTWARDS}{recipient}/{recipient}" if recipient else address


def records_beside(token_file: Path) -> Path:
    return token_file.with_name(f"{token_file.name}.complete")


def read_records(path: Path) -> dict[str, Record]:
    """Return the last states in a file, by run; none if there is no file. Raises UserError if it is damaged."""
    try:
        found = json.loads(path.read_bytes())
        return {str(run): (int(rounds), str(state)) for run, (rounds, state) in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError):
        raise UserError(
            f"{path} has the complete runs that this lighthouse knows, and cannot be read. Without it, islands that "
            "come late would train such a run alone. Delete it if none will come."
        ) from None


def kept_record(path: Path, run: str, new: Record) -> Record:
    """Add the last state of a run to a file that does not have it; return what it has. Raises OSError and UserError."""
    records = read_records(path)  # another lighthouse may use the same file
    if run not in records:
        records = dict([*records.items(), (run, new)][-MOST_RUNS:])
        write_bytes(path, json.dumps(records).encode(), durable=True)
    return records[run]


def text_of(message: dict, key: str, longest: int) -> str:
    """Return a text of a message, in which "?" replaces each unprintable character."""
    text = message.get(key)
    if not isinstance(text, str) or len(text) > longest:
        raise RequestRejected(f"a message has {key!r}, a text of at most {longest} characters")
    return "".join(each if each.isprintable() else "?" for each in text)


def seconds_of(message: dict, key: str) -> float:
    """Return a number of seconds of a message."""
    seconds = message.get(key)
    if not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST_SECONDS:
        raise RequestRejected(f"a message has {key!r}, at most {LONGEST_SECONDS} seconds")
    return seconds
