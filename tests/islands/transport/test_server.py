"""A host's server: what it answers to its fleet, and how it refuses everybody else."""

import gc
import os
import socket
import ssl
import threading
import time
import weakref
from contextlib import ExitStack, closing, suppress
from datetime import datetime

import numpy as np
import pytest

from gregale.distributed.agreement import read_token
from gregale.errors import UserError
from gregale.islands.transport import certificates, listener, transfer
from gregale.islands.transport import server as module
from gregale.islands.transport.certificates import key_and_certificate
from gregale.islands.transport.client import PeerClient, PeerUnreachable, RequestRejected, WrongServer, ask_status, call
from gregale.islands.transport.server import Server
from gregale.islands.transport.tls import tls_contexts
from gregale.islands.transport.transfer import Snapshot, VersionedArray
from tests.islands.transport.conftest import TOKEN, received


def not_taken(message: dict) -> dict:
    return pytest.fail("it was taken")


def connected(server: Server, *source: tuple[str, int]) -> socket.socket:
    return socket.create_connection((server.host, server.port), 5.0, *source)


def get(server: Server, path: str) -> dict:
    with closing(PeerClient(server.address, TOKEN, 20.0)) as client:
        return client.request("GET", path)


def test_messages_status_and_rejections(make_server):
    def answer(message: dict) -> dict:
        if not message:
            raise RequestRejected("round 3 is over")
        return {"heard": message}

    server = make_server(on_message=answer, status=lambda: {"step": 12})
    assert call(server.address, TOKEN, {"kind": "due", "round": 5}, 5.0) == {"heard": {"kind": "due", "round": 5}}
    assert ask_status(server.address, TOKEN, 5.0) == {"step": 12}
    with pytest.raises(RequestRejected, match="refuses: round 3 is over"):
        call(server.address, TOKEN, {}, 5.0)
    for path, reason in (("/manifest", "there is no state here yet"), ("/../etc/passwd", "nothing at this path")):
        with pytest.raises(RequestRejected, match=reason):
            get(server, path)


def test_neither_side_accepts_another_token(make_server):
    server, other = make_server(on_message=not_taken), make_server(b"another token here", on_message=not_taken)
    for address, token in ((server.address, b"another token here"), (other.address, TOKEN)):
        with pytest.raises(PeerUnreachable, match="it has another token"):
            call(address, token, {"kind": "due"}, 5.0)
    # Clients that accept every certificate, without one and with that of another token, get an alert.
    for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls_contexts(b"a third token here").client):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(connected(server)) as connection, pytest.raises(ssl.SSLError, match="ALERT"):
            connection.recv(1)
    for _ in range(9):
        with connected(server) as stranger:
            stranger.sendall(b"POST /message HTTP/1.1\r\n\r\n")
            assert b"HTTP" not in received(stranger)
    assert all(
        "127.0.0.1 was refused: it has another token, or does not speak TLS" in line for line in server.complaints
    )
    assert 1 <= len(server.complaints) <= listener.LINES_AT_ONCE, "strangers do not fill a log"


def test_the_certificate_is_the_tokens(make_server):
    assert key_and_certificate(TOKEN) == key_and_certificate(TOKEN)
    assert set(key_and_certificate(TOKEN)).isdisjoint(key_and_certificate(b"another token here"))
    with connected(make_server()) as plain, tls_contexts(TOKEN).client.wrap_socket(plain) as connection:
        assert connection.version() == "TLSv1.3"


@pytest.mark.parametrize("years", [(2090, 2100), (1960, 1970)], ids=["a clock before it", "a clock after it"])
def test_clocks_do_not_matter(make_server, monkeypatch, years):
    """Otherwise a host whose clock begins in 1970 would be told that it has another token."""
    monkeypatch.setattr(certificates, "VALID", tuple(datetime(year, 1, 1) for year in years))
    token = f"a fleet of {years}".encode()  # contexts are kept by token
    assert call(make_server(token).address, token, {}, 5.0) == {}


def test_no_server_answers_in_the_place_of_another(make_server):
    server, other = make_server(), make_server(on_message=not_taken)
    misdirected = f"{other.address.partition('/')[0]}/{server.recipient}"
    with pytest.raises(WrongServer, match="not the expected server"):
        call(misdirected, TOKEN, {}, 5.0)
    server.close()
    with pytest.raises(PeerUnreachable, match=rf"{server.host}:{server.port} cannot be reached: .*refused"):
        call(server.address, TOKEN, {}, 5.0)
    again = make_server(bind=f"{server.host}:{server.port}")
    with pytest.raises(WrongServer, match="started again"):
        call(server.address, TOKEN, {}, 5.0)
    assert call(again.address, TOKEN, {}, 5.0) == {}
    with pytest.raises(UserError, match=r"islands.bind: .* cannot be listened at \(Address already in use\)"):
        make_server(bind=f"{server.host}:{server.port}")


def test_a_body_that_is_too_large_or_no_object_is_refused(make_server):
    server = make_server(on_message=not_taken)
    head = f"POST /message HTTP/1.1\r\nX-Recipient: {server.recipient}\r\nContent-Length: "
    for length in ("1000000000000", "-1", "1e3"):
        with tls_contexts(TOKEN).client.wrap_socket(connected(server)) as tls:
            tls.sendall(f"{head}{length}\r\n\r\n".encode())
            assert b"at most 1048576" in received(tls)
    client = PeerClient(server.address, TOKEN, 20.0)
    with closing(client), pytest.raises(RequestRejected, match="a message is a JSON object"):
        client.request("POST", "/message", b"[1]")


@pytest.mark.parametrize("head", [b"\r\n", b"POST\r\n", b"a: b\r\n" * 100, b"x" * 100_000 + b"\r\n"])
def test_a_request_that_is_not_http_ends_only_its_connection(make_server, head):
    server = make_server(on_message=not_taken)
    with tls_contexts(TOKEN).client.wrap_socket(connected(server)) as client:
        with suppress(OSError):  # it ends the connection before it has read all of a long head
            client.sendall(head + b"\r\n")
        if len(head) < 100:
            assert client.recv(100).startswith(b"HTTP/1.1 421 "), "it has no recipient"
    with pytest.raises(RequestRejected, match="nothing at this path"):
        get(server, "/")


@pytest.mark.parametrize(
    "garbage", [b"\x00\xff" * 500, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00" + b"A" * 512]
)
def test_garbage_is_refused_in_one_line(make_server, garbage):
    server = make_server()
    with connected(server) as connection:
        connection.sendall(garbage)
        assert len(received(connection)) <= 7, "an alert at most"
    assert len(server.complaints) == 1
    assert "does not speak TLS" in server.complaints[0]
    assert call(server.address, TOKEN, {}, 5.0) == {}


def test_silent_and_slow_connections_are_closed(make_server, monkeypatch):
    monkeypatch.setattr(listener, "IDLE_SECONDS", 0.2)
    server = make_server()
    with connected(server) as silent, connected(server) as slow:
        for _ in range(200):
            try:
                slow.sendall(b"\x16")
            except OSError:
                break
            time.sleep(0.05)
        else:
            pytest.fail("it may go on for ever")
        assert silent.recv(10) == b""
    assert call(server.address, TOKEN, {}, 5.0) == {}


def test_an_authenticated_client_may_wait_long_for_an_answer(make_server, monkeypatch):
    """The copy of an inner optimizer comes at the end of a step."""
    monkeypatch.setattr(listener, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.1)
    answered = threading.Event()
    server = make_server(on_message=lambda message: {"late": not answered.wait(0.4)})
    assert call(server.address, TOKEN, {"kind": "inner"}, 20.0) == {"late": True}


def test_unidentified_connections_take_no_slot_of_the_fleet(make_server, monkeypatch):
    monkeypatch.setattr(listener, "MAX_UNIDENTIFIED", 3)
    server, before = make_server(), set(threading.enumerate())  # threads of another test's server may still end
    known = PeerClient(server.address, TOKEN, 5.0)
    known.request("GET", "/status")
    with ExitStack() as stack:
        stack.callback(known.close)
        held = [stack.enter_context(connected(server)) for _ in range(4)]
        assert held[0].recv(1) == b"", "the oldest makes place for the newest"
        threads = [thread for thread in set(threading.enumerate()) - before if "process_request" in thread.name]
        assert len(threads) <= 3 + 1 + 1
        assert known.request("GET", "/status") == {}
        assert call(server.address, TOKEN, {}, 5.0) == {}
        assert "3 connections have no handshake" in server.complaints[0]


def test_as_many_islands_as_a_large_fleet_has_connect_at_once(make_server):
    """None has made its handshake when the last one comes."""
    server = make_server()
    with ExitStack() as stack:
        held = [stack.enter_context(connected(server)) for _ in range(200)]
        for plain in held[:3]:
            with tls_contexts(TOKEN).client.wrap_socket(plain) as known:
                assert known.version() == "TLSv1.3"
    assert server.complaints == []


def test_the_address_with_the_most_unidentified_connections_loses_one(make_server, monkeypatch):
    monkeypatch.setattr(listener, "MAX_UNIDENTIFIED", 3)
    server = make_server()
    with ExitStack() as stack:
        lonely = stack.enter_context(connected(server, ("127.0.0.2", 0)))
        held: list[socket.socket] = []
        for _ in range(5):
            held.append(stack.enter_context(connected(server)))
            assert len(held) < 3 or held[-3].recv(1) == b""
        lonely.sendall(b"\x16\x03")
        lonely.settimeout(0.1)
        with pytest.raises(TimeoutError):
            lonely.recv(1)


def test_a_fetch_of_a_previous_snapshot_can_finish_and_then_the_snapshot_is_freed(make_server, monkeypatch):
    """Otherwise an outer state that somebody has fetched would be there twice from then on."""
    server, array = make_server(), np.arange(8, dtype=np.float32)
    second, content = VersionedArray(np.ones(8, np.float32), 2), array.tobytes()
    server.outer.publish(Snapshot(0, 1, {"a": VersionedArray(array, 1)}))
    peer = PeerClient(server.address, TOKEN, 5.0)
    chunk = peer.request("GET", "/manifest")["leaves"]["a"]["hash"], 0
    server.outer.publish(Snapshot(0, 2, {"a": second}))
    assert peer.request("GET", "/manifest")["round"] == 2
    got = bytearray(len(content))
    assert peer.open_chunks([chunk], len(content))
    peer.read_into(memoryview(got))
    assert bytes(got) == content
    peer.request("GET", "/manifest")  # the server has nothing more to do with the request before
    monkeypatch.setattr(transfer, "LEASE_SECONDS", 0.0)
    gone = weakref.ref(array)
    del array
    server.outer.publish(Snapshot(0, 3, {"a": second}))
    assert not peer.open_chunks([chunk], len(content))
    peer.close()
    gc.collect()
    assert gone() is None


def test_token_files(tmp_path):
    path = tmp_path / "token"
    with pytest.raises(UserError, match=r"cannot be read \(No such file"):
        read_token(path, "islands.token_file")
    path.write_text(" 0123456789abcdef\n")
    with pytest.raises(UserError, match=r"can be read by others \(mode 644\)"):
        read_token(path, "islands.token_file")
    os.chmod(path, 0o600)
    assert read_token(path, "islands.token_file") == b"0123456789abcdef"
    path.write_text("short")
    with pytest.raises(UserError, match="has 5 bytes; at least 16"):
        read_token(path, "islands.token_file")
