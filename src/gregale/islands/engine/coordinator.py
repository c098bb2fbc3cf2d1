"""The coordinator: who is there, and one answer for all of them. It is torchft's Lighthouse, run and asked from here.

    lighthouse = serve("127.0.0.1:29510", minimum=1, join_timeout_seconds=2.0, heartbeat_seconds=5.0)
    coordinator = Coordinator(lighthouse.address, "oslo", token, heartbeat_seconds=5.0)
    view = coordinator.ask({"session": "9f31", "round": 4}, timeout_seconds=30.0)
    view.id, view.instant, view.headers, view.complaints
    coordinator.close()
    lighthouse.close()

What torchft 0.2.0's Lighthouse answers, found by experiment (tests/islands/engine/test_lighthouse.py). It keeps one
pending request for each name: its data, and since when. Healthy is a name of which a heartbeat or a request has come
within `heartbeat_seconds`. Candidates are the pending that are healthy. At each tick and at each request:

- fast: if all members of the last view are candidates, all candidates are answered, newcomers too.
- else: if there are `minimum` candidates, more than half of the healthy, and either all healthy are candidates or the
  oldest candidate has waited for `join_timeout_seconds`, then all candidates are answered.

| what happens | what it does |
|---|---|
| `data`, nested, 100 kB | arrives; the answer is the same for all that are in it, `created` to the nanosecond too |
| an answer | clears all pending requests; its id is one higher only if the set of names is another than in the last |
| a lone last member asks again | is answered at once, alone, however many others live but are not asking just then |
| a living member does not ask | the others are answered after `join_timeout_seconds`, if they are more than half |
| a client gives up waiting | its request stays pending, and enters the next view with the header it had; nobody tells the client. Its age counts: the next view may form at once, without others that live |
| the same name asks twice | the newer header replaces the older, both get the same answer; right after an answer the second waits for the next one |
| no heartbeats while waiting | the request counts as one; after `heartbeat_seconds` the member is out, and its request is never answered |
| a member is killed | it counts as healthy for `heartbeat_seconds`: survivors are answered after `join_timeout_seconds` if they are more than half, else when it lapses |
| the Lighthouse starts again | pending requests end in an error; ids from 1; the first to ask may be answered alone at once |
| the address is wrong | a client cannot be made: an error after the time to connect |
"""  # noqa: E501

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from gregale.errors import UserError
from gregale.islands.engine.extra import load_coordination
from gregale.islands.engine.signing import canonical
from gregale.services.signing import is_signed, sign

CONNECT_SECONDS = 2.0
BEATS_PER_TIMEOUT = 5
LAST_REQUEST_SECONDS = 5.0  # that is waited for a request at the end
T = TypeVar("T")


class CoordinatorUnreachable(Exception):
    """Nobody listens at the coordinator's address, or the connection broke; asking again makes a new connection."""


class NoAnswer(Exception):
    """The coordinator has not answered within the time: others were waited for, or it is cut off without a word."""


class View(NamedTuple):
    """What the coordinator answered: the same for all that are in it.

    - `id`: counts up when the *membership* changes, not with each answer; from 1 again after a restart
    - `instant`: nanoseconds of the coordinator's clock when it answered: with `id` it names one answer
    - `headers`: of all members with a good signature, sorted by `name`
    - `complaints`: one line for each member that was left out, and why
    """

    id: int
    instant: int
    headers: list[dict]
    complaints: list[str]


class Lighthouse:
    """A running coordinator. `address` is `host:port` for `Coordinator`."""

    def __init__(self, server: Any, host: str):
        self._server = server
        self.address = f"{host}:{server.address().rpartition(':')[2]}"

    def close(self) -> None:
        """Stops it. Its connections end when the server is freed: `shutdown` alone leaves them answering."""
        if self._server is not None:
            self._server.shutdown()
            self._server = None


def serve(
    bind: str,
    minimum: int,
    join_timeout_seconds: float,
    heartbeat_seconds: float,
    tick_seconds: float = 0.05,
) -> Lighthouse:
    """Starts a coordinator in threads of this process that listens at `bind` (`host:port`; port 0: any).

    - `minimum`: fewer members get no answer
    - `join_timeout_seconds`: how long the first to ask waits for those that are alive and have not asked
    - `heartbeat_seconds`: a member that has not been heard of for so long is out

    Raises UserError where the address cannot be had, and without the extra `islands`.
    """
    host, colon, port = bind.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 2**16):
        raise UserError(f"bind is {bind!r}; it has to be HOST:PORT, as 127.0.0.1:29510.")
    try:
        server = load_coordination().LighthouseServer(
            bind=bind,
            min_replicas=minimum,
            join_timeout_ms=round(1000 * join_timeout_seconds),
            quorum_tick_ms=round(1000 * tick_seconds),
            heartbeat_timeout_ms=round(1000 * heartbeat_seconds),
        )
    except RuntimeError as error:
        raise UserError(f"The coordinator cannot listen at {bind}: {first_line(error)}.") from None
    return Lighthouse(server, host)


class Coordinator:
    """A member's line to the coordinator: beats in a thread from the start until `close`, reconnects on its own.

    `name` is the member's, one per fleet: a process that starts again takes its place at once.
    """

    def __init__(self, address: str, name: str, token: bytes, heartbeat_seconds: float):
        self.address, self.name, self._token = address, name, token
        self._coordination = load_coordination()
        self._asking = Line(self._coordination, address)
        self._beating = Line(self._coordination, address)
        self._interval_seconds = heartbeat_seconds / BEATS_PER_TIMEOUT
        self._heard = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gregale-heartbeat", daemon=True)
        self._thread.start()

    def ask(self, header: dict, timeout_seconds: float) -> View:
        """Sends this member's header (JSON; `name` is added) and waits for the view.

        Raises CoordinatorUnreachable or NoAnswer; both may be tried again. A request that got NoAnswer stays pending
        at the coordinator: the next view may have this member's old header (see the table above).
        """
        text = canonical({**header, "name": self.name})
        data = {"header": text.decode(), "signature": sign(self._token, b"header", text)}
        timeout = timedelta(seconds=timeout_seconds)
        answer = self._asking.use(lambda client: client.quorum(replica_id=self.name, timeout=timeout, data=data))
        self._heard = time.monotonic()
        return read_view(answer, self._token)

    @property
    def last_heard_seconds(self) -> float:
        """How long ago the coordinator last took a heartbeat or gave an answer."""
        return time.monotonic() - self._heard

    def close(self) -> None:
        """Stops beating: the others see this member go after `heartbeat_seconds`.

        Waits for a request that is under way: a thread that comes back from torchft's own code while Python ends would
        abort the process.
        """
        self._closed.set()
        self._thread.join(LAST_REQUEST_SECONDS)

    def _beat(self) -> None:
        timeout = timedelta(seconds=max(self._interval_seconds, 0.5))
        while not self._closed.wait(self._interval_seconds):
            try:
                self._beating.use(lambda client: client.heartbeat(self.name, timeout))
                self._heard = time.monotonic()
            except (CoordinatorUnreachable, NoAnswer):
                continue  # `last_heard_seconds` tells


class Line:
    """A connection to the coordinator that is made when it is used, and anew after any error."""

    def __init__(self, coordination: ModuleType, address: str):
        self._coordination, self._address = coordination, address
        self._client: Any = None

    def use(self, request: Callable[[Any], T]) -> T:
        """The request's answer. Raises CoordinatorUnreachable or NoAnswer."""
        client, self._client = self._client, None
        try:
            if client is None:
                connect = timedelta(seconds=CONNECT_SECONDS)
                client = self._coordination.LighthouseClient(f"http://{self._address}", connect)
            answer = request(client)
        except TimeoutError:
            raise NoAnswer(f"The coordinator at {self._address} has not answered in time.") from None
        except (RuntimeError, ValueError) as error:
            reason = first_line(error)
            raise CoordinatorUnreachable(f"The coordinator at {self._address} cannot be reached: {reason}") from None
        self._client = client
        return answer


def read_view(answer: Any, token: bytes) -> View:
    """What an answer says, without the members that do not know the token."""
    headers, complaints = [], []
    for member in answer.participants:
        found = read_header(member, token)
        if isinstance(found, str):
            complaints.append(found)
        else:
            headers.append(found)
    instant = answer.created.seconds * 10**9 + answer.created.nanos
    return View(int(answer.quorum_id), instant, sorted(headers, key=lambda header: header["name"]), complaints)


def read_header(member: Any, token: bytes) -> dict | str:
    """A member's header, or why it does not count."""
    data = member.data if isinstance(member.data, dict) else {}
    text, signature = data.get("header"), data.get("signature")
    who = f"A member that calls itself {member.replica_id[:80]!r} was left out: "
    if not (isinstance(text, str) and isinstance(signature, str)):
        return who + "its header has no signature."
    if not is_signed(token, signature, b"header", text.encode()):
        return who + "its header's signature is wrong; does it have another token?"
    header = json.loads(text)
    if header.get("name") != member.replica_id:
        return who + f"its header is that of {header.get('name')!r}."
    return header


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
