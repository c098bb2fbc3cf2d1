"""How processes find and authenticate each other, and agree on their settings. This module does not import JAX.

Settings that have to agree are *terms*: a flat mapping of keys to texts, sent as JSON.

Process 0 compares the terms of all processes and sends the result. If they differ, all end with the same message.

JAX waits for late processes without a message. So process 0 first listens at the coordinator's port itself. The others
connect to it and send their numbers, and each waiting process logs which processes are missing. When all have joined,
process 0 frees the port for JAX's coordinator. The connections stay open for `gregale.distributed.liveness`.

Both sides prove that they have the secret of `distributed.token_file`, each with a random nonce of the other side.
Without a secret, any host that reaches the port can block the start. If two processes have the same number, all
processes end with a message that names both. After the start, no further process can join.
"""

import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from gregale.data.sources.base import expand
from gregale.distributed.config import DistributedConfig
from gregale.distributed.liveness import EXIT_CODE, Peer, log_line, process_label
from gregale.errors import UserError
from gregale.formatting import listed
from gregale.settings import shortened

Terms = Mapping[str, str]
ABSENT = "not set"


def to_text(terms: Terms) -> str:
    """Encode terms as one line of JSON, in their order."""
    return json.dumps(dict(terms), separators=(",", ":"))


def from_text(text: str) -> Terms:
    """Decode terms of `to_text`; return any other text as one term, which differs from all others."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and all(isinstance(each, str) for each in value.values()):
        return value
    return {"what has to agree": text}


def format_term(value: Any) -> str:
    """Format a configuration value as a term on one line; a text has no quotes where that is unambiguous."""
    return value if isinstance(value, str) and value and value.isprintable() else json.dumps(value, default=str)


def difference(found: Mapping[str, Terms]) -> str:
    """Return a text with the first differing key, its value in each member, and the other differing keys; "" if none.

    - `found`: the terms of each member, by its name
    """
    keys = dict.fromkeys(key for terms in found.values() for key in terms)
    differing = [key for key in keys if len({terms.get(key) for terms in found.values()}) > 1]
    if not differing:
        return ""
    first, *others = differing
    holders: dict[str, list[str]] = {}
    for name, terms in found.items():
        holders.setdefault(terms.get(first, ABSENT), []).append(name)
    values = [f"{shortened(format_term(value))} in {listed(names)}" for value, names in holders.items()]
    also = f"; also different: {listed([format_term(key) for key in others])}" if others else ""
    return f"{format_term(first)} is {', but '.join(values)}{also}"


RULE = "All processes of a run need the same configuration, environment, text, and versions of Gregale and JAX."
OTHER_VERSION = "runs another version of Gregale, which does not send its settings"


def agree(peers: Sequence[Peer], config: DistributedConfig, terms: Terms) -> None:
    """Compare the settings of all processes; raise `UserError` in all of them if they differ.

    Exits with the code for a lost process if another process is lost meanwhile.

    - `peers`: the result of `wait_for_processes`
    - `terms`: the settings of this process
    """
    if config.process == 0:
        found: dict[str, Terms] = {process_label(0): terms}
        for peer in peers:
            found[peer.name] = from_text(_receive(peer, "settings", config.timeout_seconds))
        if differs := difference(found):
            text = f"{differs}. {RULE}"
            for peer in peers:
                peer.send(f"no {text}")
            raise UserError(text)
        for peer in peers:
            peer.send("agreed ")
        return
    (process_0,) = peers
    process_0.send(f"settings {to_text(terms)}")
    _receive(process_0, "agreed", 2 * config.timeout_seconds)


def _receive(peer: Peer, word: str, seconds: float) -> str:
    """Return the rest of a peer's line that begins with a word; raise `UserError` if the peer sends an error."""
    peer.connection.settimeout(seconds)
    line = peer.next_line()
    if line is None:
        log_line(f"error: {peer.name} was lost while the settings of all processes were compared.")
        sys.exit(EXIT_CODE)
    peer.connection.settimeout(None)
    found, _, rest = line.partition(" ")
    if found == "no":
        raise UserError(rest)
    if found != word:
        raise UserError(f"{peer.name} {OTHER_VERSION}. {RULE}")
    return rest


MIN_TOKEN_BYTES = 16


def read_token(path: Path, key: str) -> bytes:
    """Read the token from a file that only its owner may read; white space around the token is ignored.

    - `key`: the configuration key that names the file

    Raises `UserError` if there is no file, if the token is too short, or if others can read the file.
    """
    try:
        mode, token = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read ({error.strerror}).") from None
    if mode & 0o077:
        raise UserError(f"{key}: {path} can be read by others (mode {mode & 0o777:o}): chmod 600 {path}")
    if len(token) < MIN_TOKEN_BYTES:
        raise UserError(
            f"{key}: {path} has {len(token)} bytes; at least {MIN_TOKEN_BYTES} are needed, for example from: "
            f"openssl rand -hex 32 > {path}"
        )
    return token


def sign(token: bytes, *parts: bytes) -> str:
    """Return the HMAC of the parts, each with its length, so that different lists of parts differ in bytes."""
    mac = hmac.new(token, digestmod="sha256")
    for part in parts:
        mac.update(len(part).to_bytes(8, "big") + part)
    return mac.hexdigest()


def is_signed(token: bytes, signature: str, *parts: bytes) -> bool:
    """Return whether a signature is valid for the parts."""
    return hmac.compare_digest(signature.encode(), sign(token, *parts).encode())


def canonical(content: object) -> bytes:
    """Return JSON bytes that are the same for equal content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


MAX_DIGITS = 10  # of a number of processes, or a pid


class JoinRequest(NamedTuple):
    """The fields of a join line: `join`, these fields, and a proof of the secret over process 0's challenge."""

    number: int
    processes: int
    pid: int
    host: str
    nonce: str  # random text of this process, for process 0's proof

    @staticmethod
    def of(config: DistributedConfig, nonce: str) -> "JoinRequest":
        """Return the request of this process."""
        return JoinRequest(config.process, config.processes, os.getpid(), socket.gethostname(), nonce)

    def line(self, token: bytes, challenge: str) -> str:
        fields = " ".join(map(str, self))
        return f"join {fields} {sign(token, challenge.encode(), fields.encode())}"

    @staticmethod
    def parse(line: str, token: bytes, challenge: str) -> "tuple[JoinRequest, bool] | None":
        """Return the request and whether its proof is valid; None if the line is no join line."""
        words = line.split()
        # Python rejects numbers of thousands of digits.
        numbers = [word for word in words[1:4] if word.isdecimal() and len(word) <= MAX_DIGITS]
        if len(words) != 7 or words[0] != "join" or len(numbers) != 3:
            return None
        request = JoinRequest(int(words[1]), int(words[2]), int(words[3]), words[4], words[5])
        if request.number >= request.processes:
            return None
        return request, is_signed(token, words[6], challenge.encode(), " ".join(words[1:6]).encode())

    @property
    def name(self) -> str:
        return f"process {self.number} ({self.host}, pid {self.pid})"

    def answer(self, token: bytes, name: str) -> str:
        """Return process 0's proof and name, the reply to this request."""
        return f"{sign(token, self.nonce.encode(), name.encode())} {name}"

    def proved(self, token: bytes, answer: str) -> str | None:
        """Return process 0's name from its reply; None if its proof is wrong."""
        proof, _, name = answer.partition(" ")
        return name if is_signed(token, proof, self.nonce.encode(), name.encode()) else None


_LOG_LINES = 10  # number of log lines within the timeout
_MAX_LOG_INTERVAL_SECONDS = 60.0
_HEARTBEAT_SECONDS = 1.0
_RETRY_SECONDS = 0.3
_HANDSHAKE_SECONDS = 5.0
_MAX_UNREAD_BYTES = 1024
_MAX_SHOWN = 20  # numbers of missing processes in a line


def wait_for_processes(config: DistributedConfig) -> list[Peer]:
    """Wait until all processes have joined; return the peers of this process.

    Exits with the code for a lost process after `distributed.join_seconds`. Raises `UserError` in all processes if two
    have the same number, and in a process whose number of processes or secret differs from that of process 0.
    """
    token = b"" if config.token_file is None else read_token(Path(expand(config.token_file)), "distributed.token_file")
    timer = _JoinTimer(config)
    try:
        if config.process == 0:
            return RendezvousServer(config, token, timer).run()
        return [_join_process_0(config, token, timer)]
    except RendezvousTimeout as timeout:
        log_line(f"error: {timeout}")
        sys.exit(EXIT_CODE)


class RendezvousTimeout(Exception):
    """A process did not join in time."""


class _JoinTimer:
    """The timeout of the rendezvous; it logs at intervals why this process waits."""

    def __init__(self, config: DistributedConfig):
        self._max = config.join_seconds
        self._interval = min(self._max / _LOG_LINES, _MAX_LOG_INTERVAL_SECONDS)
        self._start = time.monotonic()
        self._next = self._interval

    def check(self, peers: str, failure: str) -> None:
        """Log a line if it is due; raise `RendezvousTimeout` after the timeout.

        - `peers`: a text about the missing processes, for the log
        - `failure`: the beginning of the message of the exception
        """
        waited = time.monotonic() - self._start
        if waited >= self._max:
            raise RendezvousTimeout(f"{failure} within {self._max:g} s (distributed.join_seconds).")
        if waited >= self._next:
            log_line(f"waiting for {peers}, {waited:.0f} s so far, {self._max:g} s at most (distributed.join_seconds).")
            self._next += self._interval


_NO_REQUEST = JoinRequest(-1, 0, 0, "", "")


@dataclass(eq=False)
class _Client(Peer):
    """A process that has connected to process 0."""

    challenge: str = field(default_factory=lambda: secrets.token_hex(16))  # the random text that this process must sign
    request: JoinRequest = _NO_REQUEST  # its join request, after it has arrived


class RendezvousServer:
    """The server in process 0, which accepts join requests until all processes have joined."""

    def __init__(self, config: DistributedConfig, token: bytes, timer: _JoinTimer):
        self._config, self._token, self._timer = config, token, timer
        self._joined: dict[int, _Client] = {}
        self._duplicates: dict[int, _Client] = {}  # clients with the number of a joined process, which must now reply
        self._unidentified: set[_Client] = set()
        self._own, self._is_over = JoinRequest.of(config, secrets.token_hex(16)), Event()
        self._error: UserError | None = None  # sent by another process 0
        self._last_sent = 0.0

    def run(self) -> list[Peer]:
        """Wait until all other processes have joined; return them."""
        Thread(target=self._check_own_address, daemon=True, name="rendezvous").start()
        try:
            with self._listening() as server, selectors.DefaultSelector() as selector:
                selector.register(server, selectors.EVENT_READ)
                while (missing := self._missing()) or self._duplicates:
                    for key, _ in selector.select(_HEARTBEAT_SECONDS / 4):
                        if key.data is None:
                            self._accept(server, selector)
                        else:
                            self._receive(key.data, selector)
                    self._drop_silent(selector)
                    self._report_missing(_format_missing(missing, self._config.processes))
        except RendezvousTimeout as timeout:
            self._send_all(f"late {timeout}")
            raise
        except UserError as error:
            self._send_all(f"no {error}")
            raise
        finally:
            self._is_over.set()
        for peer in self._unidentified:
            peer.connection.close()
        for peer in self._joined.values():
            peer.connection.settimeout(None)
            peer.send(f"hello {peer.request.answer(self._token, process_label(0))}")
        return [*self._joined.values()]

    def _report_missing(self, missing: str) -> None:
        """Log the missing processes at intervals, and send them to the joined processes as a heartbeat."""
        self._check_timer(missing, f"{missing} did not come to {self._config.coordinator}")
        if time.monotonic() - self._last_sent >= _HEARTBEAT_SECONDS:
            self._last_sent = time.monotonic()
            self._send_all(f"missing {missing}")

    def _listening(self) -> socket.socket:
        _, port = _address(self._config)
        taken = f"port {port} of this host, which another program holds (distributed.coordinator)"
        while True:
            try:
                if socket.has_dualstack_ipv6():
                    return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
                return socket.create_server(("", port))
            except (OSError, OverflowError) as error:
                if getattr(error, "errno", None) != errno.EADDRINUSE:
                    raise UserError(
                        f"distributed.coordinator is {self._config.coordinator}, but this process cannot listen at "
                        f"port {port} ({error}); give a port from 1024 to 65535."
                    ) from None
            self._check_timer(taken, f"{taken} did not become free")
            time.sleep(_RETRY_SECONDS)

    def _check_timer(self, missing: str, failure: str) -> None:
        if self._error is not None:
            raise self._error
        self._timer.check(missing, failure)

    def _check_own_address(self) -> None:
        """Connect to the coordinator's address as the others do: another process 0 may listen there."""
        while not self._is_over.is_set():
            address = _address(self._config)
            with (
                suppress(OSError, RendezvousTimeout),
                socket.create_connection(address, _HANDSHAKE_SECONDS) as connection,
            ):
                try:
                    _wait_for_all(Peer(connection, "", time.monotonic()), self._own, self._config, self._token)
                except UserError as error:
                    self._error = error
                return
            self._is_over.wait(_RETRY_SECONDS)

    def _missing(self) -> list[int]:
        return [number for number in range(1, self._config.processes) if number not in self._joined]

    def _accept(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection, _ = server.accept()
            connection.settimeout(_HANDSHAKE_SECONDS)
            peer = _Client(connection, "", time.monotonic())
            self._unidentified.add(peer)
            peer.send(f"challenge {peer.challenge}")
            selector.register(connection, selectors.EVENT_READ, peer)

    def _receive(self, peer: _Client, selector: selectors.BaseSelector) -> None:
        """Process the lines of a client; one that has ended is missing again."""
        if peer.connection.fileno() < 0:  # dropped a moment ago
            return
        lines = peer.received_lines()
        if lines is None or len(peer.unread) > _MAX_UNREAD_BYTES:
            self._drop(peer, selector)
        elif lines and peer in self._unidentified:
            found = JoinRequest.parse(lines[0], self._token, peer.challenge)
            if found is None or found[0].nonce == self._own.nonce:
                self._drop(peer, selector)
            elif reason := self._reason_to_reject(*found):
                log_line(f"{found[0].name} is rejected. {reason}")
                peer.send(f"no {reason}")
                self._drop(peer, selector)
            else:
                self._add(peer, found[0])
        elif "there" in lines and (duplicate := self._duplicates.get(peer.request.number)) is not None:
            raise self._duplicate_error(duplicate, peer.name)

    def _add(self, peer: _Client, request: JoinRequest) -> None:
        """Add a client under its number; if a joined process has this number, ask that process for a reply."""
        number, peer.name, peer.request = request.number, request.name, request
        self._unidentified.discard(peer)
        if number == 0:
            raise self._duplicate_error(peer, process_label(0))
        if number not in self._joined:
            self._joined[number] = peer
            return
        if number in self._duplicates:
            raise self._duplicate_error(peer, self._duplicates[number].name)
        self._duplicates[number] = peer
        self._joined[number].send("there?")

    def _duplicate_error(self, duplicate: _Client, other: str) -> UserError:
        """Return the error for two processes with one number; send it to the duplicate, and `run` to all others."""
        error = UserError(
            f"distributed.process is {duplicate.request.number} for two processes, {other} and {duplicate.name}: each "
            f"needs a number of its own, and process 0 is the one at the coordinator's address."
        )
        duplicate.send(f"no {error}")
        return error

    def _reason_to_reject(self, request: JoinRequest, is_proved: bool) -> str | None:
        if not is_proved:
            return (
                f"{request.name} has another secret than process 0, or one of them has none; give all processes the "
                f"same distributed.token_file."
            )
        if request.processes != self._config.processes:
            return (
                f"{request.name} has distributed.processes {request.processes}, and process 0 has "
                f"{self._config.processes}; give all processes the same."
            )
        return None

    def _drop(self, peer: _Client, selector: selectors.BaseSelector) -> None:
        """Close the connection of a client; a duplicate with its number replaces it."""
        selector.unregister(peer.connection)
        peer.connection.close()
        self._unidentified.discard(peer)
        number = peer.request.number
        if self._duplicates.get(number) is peer:
            del self._duplicates[number]
        elif self._joined.get(number) is peer:
            del self._joined[number]
            if (duplicate := self._duplicates.pop(number, None)) is not None:
                self._joined[number] = duplicate

    def _drop_silent(self, selector: selectors.BaseSelector) -> None:
        """Drop clients that send no join request, and joined processes that do not reply while there is a duplicate.

        Such a process may have lost its host and been restarted elsewhere.
        """
        now = time.monotonic()
        silent = [peer for peer in self._unidentified if now - peer.last_heartbeat > _HANDSHAKE_SECONDS]
        late = [number for number, each in self._duplicates.items() if now - each.last_heartbeat > _HANDSHAKE_SECONDS]
        silent += [self._joined[number] for number in late]
        for peer in silent:
            self._drop(peer, selector)

    def _send_all(self, line: str) -> None:
        for peer in [*self._joined.values(), *self._duplicates.values()]:
            peer.send(line)


def _join_process_0(config: DistributedConfig, token: bytes, timer: _JoinTimer) -> Peer:
    """Join through process 0; return it when all processes have joined."""
    while True:
        request = JoinRequest.of(config, secrets.token_hex(16))
        why = "it does not answer"
        try:
            connection = socket.create_connection(_address(config), _HANDSHAKE_SECONDS)
        except (OSError, OverflowError) as error:
            why = str(error)
        else:
            peer = Peer(connection, "process 0", time.monotonic())
            with ExitStack() as stack:
                stack.callback(connection.close)
                if _wait_for_all(peer, request, config, token):
                    stack.pop_all()
                    return peer
        timer.check(
            f"process 0 at {config.coordinator} ({why})", f"process 0 did not answer at {config.coordinator} ({why})"
        )
        time.sleep(_RETRY_SECONDS)


def _wait_for_all(process_0: Peer, request: JoinRequest, config: DistributedConfig, token: bytes) -> bool:
    """Wait until process 0 reports that all have joined; return False if it is silent or gone, for a retry."""
    process_0.connection.settimeout(config.timeout_seconds)
    while (line := process_0.next_line(_MAX_UNREAD_BYTES)) is not None:
        word, _, rest = line.partition(" ")
        if word == "challenge":
            process_0.send(request.line(token, rest))
        if word == "there?":
            process_0.send("there")
        if word == "no":
            raise UserError(rest)
        if word == "late":
            raise RendezvousTimeout(rest)
        if word == "hello":
            if (name := request.proved(token, rest)) is None:
                raise UserError(
                    f"distributed.token_file: the program at {config.coordinator} has another secret than this "
                    f"process; it may be another program. Give all processes the same file."
                )
            process_0.name = name
            process_0.connection.settimeout(None)
            return True
    return False


def _address(config: DistributedConfig) -> tuple[str, int]:
    host, _, port = (config.coordinator or "").rpartition(":")
    return host.strip("[]"), int(port)


def _format_missing(missing: Sequence[int], processes: int) -> str:
    """Format the numbers of missing processes; there are none while one of two duplicates must reply."""
    if not missing:
        return f"an answer of one of {processes} processes"
    numbers = listed([str(number) for number in missing], _MAX_SHOWN)
    return f"process{'es' if len(missing) > 1 else ''} {numbers} of {processes}"
