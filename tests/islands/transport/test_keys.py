"""Keys of members: whom the ports of a fleet accept for which name, and what a revocation does.

The ports are a coordinator's and an island's server; an island's other hosts have the same server.
"""

import json
import os
import re
import resource
import secrets
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from gregale.atomic_files import is_held
from gregale.cli import main
from gregale.errors import UserError
from gregale.islands.config import IslandsConfig
from gregale.islands.driver import with_own_addresses
from gregale.islands.protocol.messages import FORMAT, GarbageError, Header
from gregale.islands.run import checked_token
from gregale.islands.steps import StatusTracker
from gregale.islands.transport import tls
from gregale.islands.transport.certificates import (
    PLAIN,
    certificates_of,
    is_revocation,
    key_file,
    signed_revocation,
    signing_key,
)
from gregale.islands.transport.client import KeyRevoked, PeerClient, RequestRejected, WrongServer, ask_status, call
from gregale.islands.transport.coordinator import CoordinatorClient, NotAdmitted, Revoked, headers_of_fleet
from gregale.islands.transport.group import Group, GroupFailed
from gregale.islands.transport.lighthouse import NAME, Lighthouse
from gregale.islands.transport.revocations import Revocations, list_beside, lock_of
from gregale.islands.transport.tls import read_credentials, tls_contexts
from tests.islands.transport.conftest import WAIT_SECONDS
from tests.islands.transport.test_lighthouse import TIMING
from tests.waiting import until

BEAT = {"format": FORMAT, "kind": "beat", "session": "s", "stalled": "", "round": -1, "here": True, "met": True}
BEAT |= {"run": "", "heartbeat_seconds": 9.0}
PORTS = ["coordinator", "island"]


@pytest.fixture
def token() -> bytes:
    return secrets.token_hex(16).encode()  # what a process knows of revocations is kept by token


@pytest.fixture
def listen(make_server, token) -> Iterator[Callable[..., str]]:
    """`listen(port, token)`: the address of a server, which a member of the fleet may ask for its own name."""
    lighthouses = []

    def make(port: str, held: bytes = token) -> str:
        if port == "island":
            return make_server(held, name="turin").address
        lighthouses.append(Lighthouse("127.0.0.1:0", held))
        return f"{lighthouses[-1].address}/{NAME}"

    yield make
    for each in lighthouses:
        each.close()


def signed_by(issuer: x509.Certificate, signer: Ed25519PrivateKey | None, name: str) -> bytes:
    """A key for a name with a certificate that the issuer's key has signed (None: its own), and the issuer's."""
    key = Ed25519PrivateKey.generate()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)] if name else [])
    end = datetime.now(UTC) + timedelta(days=9)
    issued = issuer.subject if signer else subject
    builder = x509.CertificateBuilder(issued, subject, key.public_key(), 5, datetime(2020, 1, 1), end)
    certificate = builder.sign(signer or key, None)
    return b"".join([key.private_bytes(*PLAIN), *(each.public_bytes(Encoding.PEM) for each in (certificate, issuer))])


def foreign(token: bytes) -> dict[str, bytes]:
    """What strangers show: nothing, and keys for the name oslo that the authority has not signed."""
    own = key_file(token, "rome", {}, 9.0)
    member, authority = map(x509.load_der_x509_certificate, certificates_of(own))
    rome = load_pem_private_key(own, None)
    assert isinstance(rome, Ed25519PrivateKey)
    return {
        "nothing": b"",
        "another fleet's": key_file(b"another token here", "oslo", {}, 9.0),
        "its own, with that name": signed_by(authority, None, "oslo"),
        "its own, with the authority's name": signed_by(authority, None, "gregale fleet"),
        "signed by a member's key": signed_by(member, rome, "oslo"),
        "not signed by whom it names": signed_by(authority, Ed25519PrivateKey.generate(), "oslo"),
    }


def context_of(shown: bytes, side: int, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if shown:
        (folder / "shown").write_bytes(shown)
        context.load_cert_chain(folder / "shown")
    return context


@contextmanager
def false_server(context: ssl.SSLContext) -> Iterator[str]:
    """A server that shows what its context has, to one client."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection, pytest.raises(OSError):
                context.wrap_socket(connection, server_side=True).recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}/turin"
        thread.join(WAIT_SECONDS)


@pytest.mark.parametrize("port", PORTS)
def test_no_port_and_no_client_accepts_a_certificate_that_the_authority_has_not_signed(listen, token, port, tmp_path):
    address = listen(port)
    host, _, number = address.partition("/")[0].partition(":")
    for shown in foreign(token).values():
        context = context_of(shown, ssl.PROTOCOL_TLS_CLIENT, tmp_path)
        with (
            context.wrap_socket(socket.create_connection((host, int(number)), 5.0)) as connection,
            pytest.raises(ssl.SSLError, match="ALERT"),
        ):
            connection.recv(1)
        if shown and port == "island":
            context = context_of(shown, ssl.PROTOCOL_TLS_SERVER, tmp_path)
            with false_server(context) as false, pytest.raises(WrongServer, match="it has another token"):
                ask_status(false, key_file(token, "oslo", {}, 9.0), 5.0)
    assert call(address, key_file(token, "oslo", {}, 9.0), {**BEAT, "name": "oslo"}, 5.0) is not None


@pytest.mark.parametrize("port", PORTS)
def test_every_port_refuses_a_name_that_is_not_the_keys_and_an_expired_or_revoked_key(
    listen, token, port, tmp_path, monkeypatch
):
    oslo, long_ago = key_file(token, "oslo", {}, 9.0), datetime(2020, 1, 1, tzinfo=UTC)
    address, message = listen(port), {**BEAT, "name": "oslo"}
    for each in (oslo, token):
        call(address, each, message, 5.0)

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(1970, 1, 1, tzinfo=tz)

    early = "clock of the host that checks the key of oslo is at 1970-01-01, before"
    with monkeypatch.context() as patch:
        patch.setattr(tls, "datetime", Clock)
        with pytest.raises(RequestRejected, match=early):
            call(address, oslo, message, 5.0)
        call(address, token, message, 5.0)  # the fleet's token has no times
        with pytest.raises(
            UserError, match=r"k: .*oslo.key cannot be used: the clock .* 1970-01-01.*\. Set the clock\."
        ):
            read_credentials(written(oslo, tmp_path / "oslo.key"), "k", "oslo")
    for kind in ("beat", "ask", "leave", "host"):
        for name in ("turin", "", None, ["oslo"]):
            with pytest.raises(RequestRejected, match="it has the key of oslo, not of "):
                call(address, oslo, {**message, "kind": kind, "name": name}, 5.0)
    with pytest.raises(RequestRejected, match="the key of oslo expired on 2020-01-10"):
        call(address, key_file(token, "oslo", {}, 9.0, long_ago), message, 5.0)
    with closing(PeerClient(address, oslo, 5.0)) as opened:
        opened.connect()
        tls_contexts(token).revoked.take({"oslo": [1, signed_revocation(token, "oslo", 1)]})
        assert opened._connection.sock.recv(1) == b"", "open connections end"
        for path in ("/status", "/manifest", "/nowhere"):
            with closing(PeerClient(address, oslo, 5.0)) as client, pytest.raises(KeyRevoked, match="oslo was revoked"):
                client.request("GET", path)
    call(address, key_file(token, "oslo", {"": 1}, 9.0), message, 5.0)


def test_no_member_answers_in_the_place_of_another(make_server, token):
    rome, long_ago = key_file(token, "rome", {}, 9.0), datetime(2020, 1, 1, tzinfo=UTC)
    for held, reason in (
        (key_file(token, "oslo", {}, 9.0), "it has the key of oslo, not of turin"),
        (key_file(token, "turin", {}, 9.0, long_ago), "the key of turin expired on 2020-01-10"),
    ):
        with pytest.raises(WrongServer, match=f"is not accepted: {reason}"):
            ask_status(make_server(held, name="turin").address, rome, 5.0)
    address = make_server(key_file(token, "turin", {}, 9.0), name="turin").address
    assert ask_status(address, rome, 5.0) == {}
    header = Header("oslo", "s", 1, "", "", ("127.0.0.1:1/oslo:ab", address))
    assert isinstance(with_own_addresses(header), GarbageError)
    with closing(PeerClient(address, rome, 5.0)) as opened:  # also on an open connection
        opened.connect()
        tls_contexts(rome).revoked.take({"turin": [1, signed_revocation(token, "turin", 1)]})
        with pytest.raises(WrongServer, match="the key of turin was revoked"):
            opened.request("GET", "/status")


def test_false_coordinators_and_hosts_of_an_island_are_refused(listen, token):
    oslo = key_file(token, "oslo", {}, 9.0)
    with pytest.raises(NotAdmitted, match="is not accepted: it has the key of turin, not of lighthouse"):
        headers_of_fleet([listen("coordinator", key_file(token, "turin", {}, 9.0)).partition("/")[0]], oslo)
    assert headers_of_fleet([listen("coordinator", key_file(token, NAME, {}, 9.0)).partition("/")[0]], oslo) == {}
    tracker = StatusTracker("turin", 1, 0)
    tracker._driver = object()  # type: ignore[assignment] # an AttributeError if it was taken
    for message in ({"kind": "host", "name": "oslo", "host": 1, "have": 0}, {"kind": "host", "host": 1, "have": 0}):
        with pytest.raises(RequestRejected, match="unknown message"):
            tracker.on_message(message)


def test_a_stream_for_another_member_is_refused_and_a_revocation_ends_open_streams(make_server, token):
    keys = [key_file(token, name, {}, 9.0) for name in ("oslo", "turin", "rome")]
    servers = [make_server(key, name=name) for key, name in zip(keys, ("oslo", "turin", "rome"), strict=True)]
    names, hosts = ["oslo", "turin"], [server.address for server in servers[:2]]
    groups = [Group("key", rank, hosts, servers[rank], names) for rank in range(2)]
    with closing(PeerClient(hosts[0], keys[2], 5.0)) as client:
        stream = client.open_stream({"group": "key", "rank": 1, "seconds": 1.0}, 5.0)
        stream.settimeout(WAIT_SECONDS)
        assert b" 403 " in stream.recv(100)
        stream.close()
    assert any("was refused: it has the key of rome, not of turin" in each for each in servers[0].complaints)
    thread = threading.Thread(target=groups[0].connect, args=(WAIT_SECONDS,))
    thread.start()
    groups[1].connect(WAIT_SECONDS)
    thread.join()
    work = groups[0].recv(1, np.zeros(5, np.uint8))
    tls_contexts(keys[0]).revoked.take({"turin": [1, signed_revocation(token, "turin", 1)]})
    with pytest.raises(GroupFailed, match="the connection to turin has ended"):
        work.wait(WAIT_SECONDS)
    for group in groups:
        group.drop()


@pytest.mark.parametrize("revoked", ["oslo", "turin"])
def test_a_revocation_ends_the_relays_of_its_key_and_no_other_connection(make_server, token, revoked):
    relay = make_server(token, recipient=NAME, relays=4)
    keys = [key_file(token, name, {}, 9.0) for name in ("oslo", "turin")]
    caller, called = (
        make_server(key, address="outwards", name=name) for key, name in zip(keys, ("oslo", "turin"), strict=True)
    )
    for host, other in ((caller, called), (called, caller)):
        host.paths.update(host.address, [other.address], relay.address)
    with closing(PeerClient(called.address, keys[0], WAIT_SECONDS, caller.paths.dial)) as client:
        client.connect()
        tls_contexts(token).revoked.take({"rome": [1, signed_revocation(token, "rome", 1)]})
        until(lambda: relay._http._revocations_seen == 1)
        client.request("GET", "/status")
        assert ask_status(relay.address, token, WAIT_SECONDS) == {}
        # The hosts have not heard of it: the relay itself ends both sides.
        tls_contexts(token).revoked.take({revoked: [1, signed_revocation(token, revoked, 1)]})
        until(lambda: relay.relays._value == 4)
        with suppress(ConnectionError, ssl.SSLError):
            assert client._connection.sock.recv(1) == b""


def commanded(capsys, *words: str) -> str:
    """What `gregale islands` prints, or its error."""
    code, captured = main(["islands", *words]), capsys.readouterr()
    assert code == (2 if captured.err else 0)
    return captured.out + captured.err


def written(token: bytes, path: Path) -> Path:
    path.write_bytes(token)
    path.chmod(0o600)
    return path


def test_a_revocation_reaches_coordinators_and_islands_and_outlives_them(token, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path, other = (written(token, tmp_path / name) for name in ("islands.token", "elsewhere.token"))
    for name in ("oslo", "turin", NAME):
        commanded(capsys, "key", name)
    oslo, turin, coordinator = (read_credentials(Path(f"{name}.key"), "k", name) for name in ("oslo", "turin", NAME))
    first = Lighthouse("127.0.0.1:0", coordinator)
    members = [CoordinatorClient(first.address, name, key, TIMING) for name, key in (("oslo", oslo), ("turin", turin))]
    assert "islands.token.revoked has a new revocation of oslo: it ends all keys" in commanded(capsys, "revoke", "oslo")
    Path("lighthouse.key.revoked").write_bytes(list_beside(path).read_bytes())
    until(lambda: members[0].revoked is not None and list_beside(Path("turin.key")).exists())
    with pytest.raises(
        Revoked, match=r"islands\.token_file: .* refuses: the key of oslo was revoked\. This island ends"
    ):
        members[0].ask({"x": 0}, 1)
    first.close()
    # A coordinator that has lost its list learns it from an island, and writes it beside its token.
    tls_contexts.cache_clear()
    second = Lighthouse("127.0.0.1:0", read_credentials(other, "k", "any"))
    turin_again = read_credentials(Path("turin.key"), "k", "turin")
    with closing(CoordinatorClient(second.address, "turin", turin_again, TIMING)):
        until(list_beside(other).exists)
    with pytest.raises(Revoked, match="the key of oslo was revoked"):
        headers_of_fleet([second.address], oslo)
    assert "follows the 1 revocations of oslo in islands.token" in commanded(capsys, "key", "oslo", "--out", "new.key")
    assert headers_of_fleet([second.address], read_credentials(Path("new.key"), "k", "oslo")) == {}
    for each in (*members, second):
        each.close()


@pytest.mark.parametrize("port", PORTS)
def test_a_revocation_at_an_outdated_copy_of_the_token_ends_all_keys_made_so_far(listen, token, port, tmp_path, capsys):
    """The second copy knows none of the first one's revocations, and their lists are merged in either order."""
    first, second = (written(token, tmp_path / name) for name in ("first", "second"))
    commanded(capsys, "key", "rome", "--token_file", str(first), "--out", str(tmp_path / "rome"))
    keys = list[bytes]()

    def make(copy: Path) -> bytes:
        tls_contexts.cache_clear()  # each command is a process of its own
        out = tmp_path / f"oslo.{len(keys)}"
        commanded(capsys, "key", "oslo", "--token_file", str(copy), "--out", str(out))
        keys.append(out.read_bytes())
        return keys[-1]

    def revoke(copy: Path) -> None:
        tls_contexts.cache_clear()
        commanded(capsys, "revoke", "oslo", "--token_file", str(copy))

    def entries(copy: Path) -> dict:
        return json.loads(list_beside(copy).read_bytes())

    make(first)
    make(second)
    for _ in range(2):
        revoke(first)
        make(first)
    revoke(second)
    late = make(second)  # it follows the second copy's revocation alone
    address, message = listen(port), {**BEAT, "name": "oslo"}
    known = tls_contexts(token).revoked
    known.take(entries(second))
    for key in keys[:-1]:
        with pytest.raises(KeyRevoked, match="the key of oslo was revoked"):
            call(address, key, message, 5.0)
    call(address, late, message, 5.0)
    known.take(entries(first))
    for key in keys:
        with pytest.raises(KeyRevoked, match="the key of oslo was revoked"):
            call(address, key, message, 5.0)
    list_beside(second).write_text(json.dumps({**entries(first), **entries(second)}))
    make(second)
    tls_contexts(token).revoked.take(entries(second))
    call(address, keys[-1], message, 5.0)
    call(address, (tmp_path / "rome").read_bytes(), {**message, "name": "rome"}, 5.0)


def test_a_key_and_a_list_of_an_earlier_version_hold_and_a_new_revocation_ends_them(listen, token, tmp_path, capsys):
    path = written(token, tmp_path / "token")
    list_beside(path).write_text(json.dumps(entry(token, "oslo")))
    keys = [key_file(token, "oslo", {"": count} if count else {}, 9.0) for count in (0, 1)]
    address, message = listen("coordinator"), {**BEAT, "name": "oslo"}
    read_credentials(path, "k", NAME)
    with pytest.raises(KeyRevoked):
        call(address, keys[0], message, 5.0)
    call(address, keys[1], message, 5.0)
    commanded(capsys, "revoke", "oslo", "--token_file", str(path))
    with pytest.raises(KeyRevoked):
        call(address, keys[1], message, 5.0)
    commanded(capsys, "key", "oslo", "--token_file", str(path), "--out", str(tmp_path / "new"))
    call(address, (tmp_path / "new").read_bytes(), message, 5.0)


def test_a_list_counts_signed_entries_alone_and_never_goes_back(token, tmp_path):
    strange = signed_by(x509.load_der_x509_certificate(tls_contexts(token).authority), signing_key(token), "")
    assert tls.is_revoked(token, certificates_of(strange)[0]), "the authority has signed it, but not Gregale written"
    known = tls_contexts(token).revoked
    second, first = ([count, signed_revocation(token, "oslo", count)] for count in (2, 1))
    for entries in ({"oslo": [9, second[1]]}, {"rome": first}, {"oslo": [1, "zz"]}, {"oslo": 1}, [1], "x", None):
        known.take(entries)
        assert known.to_json() == {}
    known.take({"oslo": second})
    known.take({"oslo": first})
    assert known.to_json() == {"oslo": second}
    path = written(token, tmp_path / "token")
    list_beside(path).write_text('{"oslo": [3, "00"]}')
    with pytest.raises(UserError, match=r"token\.revoked is no list of revocations of this fleet"):
        read_credentials(path, "token_file", "x")


def process_with(token: bytes, path: Path) -> Revocations:
    """What a process with this token file knows."""
    known = Revocations(partial(is_revocation, tls_contexts(token).authority))
    known.follow(list_beside(path))
    return known


def entry(token: bytes, name: str) -> dict[str, list]:
    return {name: [1, signed_revocation(token, name, 1)]}


def test_a_process_that_learns_an_entry_keeps_those_that_another_has_written(token, tmp_path, capsys):
    path = written(token, tmp_path / "token")
    processes = [process_with(token, path) for _ in range(2)]
    commanded(capsys, "revoke", "oslo", "--token_file", str(path))
    processes[0].take(entry(token, "rome"))
    assert [each.partition("/")[0] for each in json.loads(list_beside(path).read_bytes())] == ["oslo", "rome"]
    with processes[1].rewriting():
        assert is_held(lock := lock_of(list_beside(path)))
    assert lock.stat().st_mode & 0o777 == 0o600
    assert processes[1].of("rome") == {"": 1}


def test_a_list_copied_over_another_one_replaces_no_entry_that_a_process_knows(token, tmp_path):
    path = written(token, tmp_path / "token")
    known = process_with(token, path)
    for name in ("oslo", "rome"):
        list_beside(path).write_text(json.dumps(entry(token, name)))
        assert known.reload() == ""
    assert (known.of("oslo"), known.of("rome")) == ({"": 1}, {"": 1})
    assert list(process_with(token, path).to_json()) == ["oslo", "rome"]


def test_a_list_that_could_not_be_read_is_read_again(token, tmp_path):
    known = process_with(token, path := tmp_path / "token")
    list_beside(path).write_text(json.dumps(entry(token, "oslo")))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # no more files can be opened
    try:
        assert "cannot be read" in known.reload()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (known.reload(), known.of("oslo")) == ("", {"": 1})


def test_what_the_commands_refuse(token, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(token, tmp_path / "islands.token")
    commanded(capsys, "key", "oslo", "--days", "1e-12")
    assert Path("oslo.key").stat().st_mode & 0o777 == 0o600
    assert "oslo.key exists, and a key is not overwritten" in commanded(capsys, "key", "oslo")
    for command in ("key", "revoke"):
        assert "name is 'a b'" in commanded(capsys, command, "a b")
    commanded(capsys, "key", "rome")
    assert main(["lighthouse", "--token_file", "rome.key"]) == 2
    assert "token_file: rome.key cannot be used: it has the key of rome, not of lighthouse" in capsys.readouterr().err
    Path("damaged.key").write_bytes(Path("rome.key").read_bytes()[:-300])
    Path("damaged.key").chmod(0o600)
    for command, file, refused in (
        ("key", "oslo", "oslo.key cannot be used: the key of oslo expired"),
        ("revoke", "rome", "has the key of rome, not of the fleet, which signs. Give the fleet's token."),
        ("key", "damaged", "damaged.key begins as a key of a member, but is damaged"),
    ):
        assert refused in commanded(capsys, command, "x", "--token_file", f"{file}.key")


def test_a_key_that_cannot_be_written_leaves_no_file(token, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(token, tmp_path / "islands.token")
    refused = "error: out: absent/x.key cannot be written (No such file or directory). Give a path"
    assert refused in commanded(capsys, "key", "oslo", "--out", "absent/x.key")
    assert "error: out: . exists, and a key is not overwritten" in commanded(capsys, "key", "oslo", "--out", ".")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", None)  # a file system without hard links
        commanded(capsys, "key", "oslo")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as a disk that becomes full
    try:
        assert "error: out: rome.key cannot be written (File too large)" in commanded(capsys, "key", "rome")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["islands.token", "oslo.key"]


def test_an_island_has_a_name_of_its_own_and_its_hosts_need_that_of_its_key(token, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(token, tmp_path / "islands.token")
    commanded(capsys, "key", NAME)

    settings = IslandsConfig(lighthouse="127.0.0.1:1", token_file="lighthouse.key")
    coordinators = "islands.name: this island's name is lighthouse (the name of its host, if the key is not set), but"
    with pytest.raises(UserError, match=re.escape(coordinators)):
        checked_token(replace(settings, name=NAME))
    monkeypatch.setattr(socket, "gethostname", lambda: NAME)
    with pytest.raises(UserError, match=re.escape(coordinators)):
        checked_token(settings)
    commanded(capsys, "key", "oslo")
    settings = replace(settings, token_file="oslo.key")
    monkeypatch.setattr(socket, "gethostname", lambda: "oslo-1")
    for name, reason in (
        (None, r"oslo-1\. That is the host's name: set islands\.name to the name"),
        ("rome", r"rome\. `gregale islands key NAME` makes a key"),
    ):
        with pytest.raises(UserError, match=rf"of oslo, not of {reason}"):
            checked_token(replace(settings, name=name))
    assert checked_token(replace(settings, name="oslo")).startswith(b"-----BEGIN ")


def test_a_member_stays_revoked_when_another_coordinator_fails(token):
    oslo = key_file(token, "oslo", {}, 9.0)
    tls_contexts(token).revoked.take(entry(token, "oslo"))
    with closing(Lighthouse("127.0.0.1:0", token)) as lighthouse:
        client = CoordinatorClient([lighthouse.address, "127.0.0.1:1"], "oslo", oslo, TIMING)
        client.close()  # ends the heartbeats
        assert [bool(client._say(index, "leave", {}).error) for index in range(2)] == [True, True]
    assert client.revoked is not None
