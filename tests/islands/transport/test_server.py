"""A host's server: what it answers to its fleet, and how it refuses everybody else."""

import gc
import json
import os
import socket
import threading
import time
import weakref
from contextlib import ExitStack, suppress

import numpy as np
import pytest

from gregale.distributed.signing import digest, read_token, sign
from gregale.errors import UserError
from gregale.islands.transport import listener, snapshot_store
from gregale.islands.transport import server as module
from gregale.islands.transport.client import PeerClient, PeerUnreachable, RequestRejected, ask_status, call
from gregale.islands.transport.server import Server
from gregale.islands.transport.snapshot_store import ServedArray, Snapshot
from tests.islands.transport.conftest import TOKEN, exchange

UNSIGNED = "127.0.0.1 was refused: its signature is missing or wrong: it has another token, or was meant for another "
NOTHING = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def not_taken(message: dict) -> dict:
    return pytest.fail("it was taken")


def connected(server: Server, *source: tuple[str, int]) -> socket.socket:
    return socket.create_connection((server.host, server.port), 5.0, *source)


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
            PeerClient(server.address, TOKEN, 5.0).request("GET", path)


def test_neither_side_believes_another_token(make_server):
    server, other = make_server(on_message=not_taken), make_server(b"another token here", on_message=not_taken)
    for address, token in ((server.address, b"another token here"), (other.address, TOKEN)):
        with pytest.raises(PeerUnreachable, match="it has another token"):
            call(address, token, {"kind": "due"}, 5.0)
    assert [line.startswith(UNSIGNED) for line in server.complaints] == [True]
    for path in (b"/message", b"/status", b"/", b"/manifest", b"/store"):
        for number in range(5):
            head = b"POST %s HTTP/1.1\r\nX-Signature: 0%d\r\nContent-Length: 2\r\n\r\n" % (path, number)
            assert exchange(server.address, head + b"{}") == NOTHING
    assert len(server.complaints) <= listener.LINES_AT_ONCE, "strangers do not fill a log"


def signed(server: Server, body: bytes, moment: float, nonce: str, **more: str) -> bytes:
    """A request for a server as it is on the wire, with `more` headers in place of the right ones."""
    hashed = digest(body)
    parts = server.recipient, "POST", "/message", f"{moment:.3f}", nonce, hashed
    headers = {"X-Nonce": nonce, "X-Time": f"{moment:.3f}", "X-Body": hashed, "Content-Length": str(len(body))}
    headers["X-Signature"] = sign(TOKEN, *(part.encode() for part in parts))
    headers |= {"Connection": "close"} | more
    text = "POST /message HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return text.encode() + b"\r\n" + body


def test_a_captured_request_is_refused_later_and_by_every_other_server(make_server):
    taken, now = [], time.time()
    server = make_server(on_message=lambda message: taken.append(message) or {})
    other = make_server(on_message=not_taken)
    captured = signed(server, b"{}", now, "n1")
    assert exchange(other.address, captured) == NOTHING
    assert b" 200 " in exchange(server.address, captured)
    assert b"was already used" in exchange(server.address, captured)
    assert b"clock is 1000 s away" in exchange(server.address, signed(server, b"{}", now - 1000, "n2"))
    for changed in ({"X-Nonce": "n4"}, {"X-Body": digest(b"[]")}):
        assert exchange(server.address, signed(server, b"{}", now, "n3", **changed)) == NOTHING
    assert len(taken) == 1
    server.close()
    with pytest.raises(PeerUnreachable, match=rf"{server.host}:{server.port} cannot be reached: .*refused"):
        call(server.address, TOKEN, {}, 5.0)
    again = make_server(bind=f"{server.host}:{server.port}")
    assert exchange(again.address, captured) == NOTHING, "a restarted server has another identity"
    with pytest.raises(PeerUnreachable, match="started again"):
        call(server.address, TOKEN, {}, 5.0)
    assert call(again.address, TOKEN, {}, 5.0) == {}
    with pytest.raises(UserError, match=r"islands.bind: .* cannot be listened at \(Address already in use\)"):
        make_server(bind=f"{server.host}:{server.port}")


def test_a_body_that_is_too_large_or_another_is_refused(make_server):
    server, now = make_server(on_message=not_taken), time.time()
    for nonce, length in {"n1": "1000000000000", "n2": "-1", "n3": "1e3"}.items():
        request = signed(server, b"{}", now, nonce, **{"Content-Length": length})
        assert b"at most 1048576" in exchange(server.address, request)
    assert b"not the one that was signed" in exchange(server.address, signed(server, b"{}", now, "n4")[:-2] + b"[]")
    assert b"a message is a JSON object" in exchange(server.address, signed(server, b"[1]", now, "n5"))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff" * 500 + b"\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"A" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200,
        b"GET / HTTP/1.1\r\n" + (b"a: " + b"b" * 1000 + b"\r\n") * 10,  # fewer headers, too large together
    ],
)
def test_garbage_is_refused_in_one_line(make_server, garbage):
    server = make_server()
    with connected(server) as connection:
        connection.sendall(garbage)
        with suppress(ConnectionResetError):  # it may close before it has read everything
            assert connection.recv(100) == b""
    assert len(server.complaints) == 1
    assert "does not speak HTTP" in server.complaints[0]
    assert call(server.address, TOKEN, {}, 5.0) == {}


def test_silent_and_slow_connections_are_closed(make_server, monkeypatch):
    monkeypatch.setattr(listener, "IDLE_SECONDS", 0.2)
    server = make_server()
    with connected(server) as silent, connected(server) as slow:
        for _ in range(200):
            try:
                slow.sendall(b"G")
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
        assert "3 connections have brought no request" in server.complaints[0]


def test_the_address_with_the_most_unidentified_connections_loses_one(make_server, monkeypatch):
    monkeypatch.setattr(listener, "MAX_UNIDENTIFIED", 3)
    server = make_server()
    with ExitStack() as stack:
        lonely = stack.enter_context(connected(server, ("127.0.0.2", 0)))
        held: list[socket.socket] = []
        for _ in range(5):
            held.append(stack.enter_context(connected(server)))
            assert len(held) < 3 or held[-3].recv(1) == b""
        lonely.sendall(b"POST")
        lonely.settimeout(0.1)
        with pytest.raises(TimeoutError):
            lonely.recv(1)


def test_a_fetch_of_a_previous_snapshot_can_finish_and_then_the_snapshot_is_freed(make_server, monkeypatch):
    """Otherwise an outer state that somebody has fetched would be there twice from then on."""
    server, array = make_server(), np.arange(8, dtype=np.float32)
    second, content = ServedArray(np.ones(8, np.float32), 2), array.tobytes()
    server.outer.publish(Snapshot(0, 1, {"a": ServedArray(array, 1)}))
    peer = PeerClient(server.address, TOKEN, 5.0)
    chunk = peer.request("GET", "/manifest")["leaves"]["a"]["hash"], 0
    server.outer.publish(Snapshot(0, 2, {"a": second}))
    assert peer.request("GET", "/manifest")["round"] == 2
    got = bytearray(len(content))
    assert peer.open_chunks([chunk], len(content))
    peer.read_into(memoryview(got))
    assert bytes(got) == content
    peer.request("GET", "/manifest")  # the server has nothing more to do with the request before
    monkeypatch.setattr(snapshot_store, "LEASE_SECONDS", 0.0)
    gone = weakref.ref(array)
    del array
    server.outer.publish(Snapshot(0, 3, {"a": second}))
    assert not peer.open_chunks([chunk], len(content))
    peer.close()
    gc.collect()
    assert gone() is None


def test_values_for_a_group_are_limited_and_a_cancelled_group_ends_its_waits(make_server):
    server, found = make_server(), []
    message = {"group": "g", "key": "0", "value": "00" * 70_000}
    with pytest.raises(RequestRejected, match="no room for this value"):
        call(server.address, TOKEN, message, 5.0, "/store")
    call(server.address, TOKEN, message | {"value": "0102"}, 5.0, "/store")
    mailbox = server.mailbox
    assert mailbox.get("g", "0", 1.0) == b"\x01\x02"
    waiting = threading.Thread(target=lambda: found.append(mailbox.get("g", "1", 60.0)))
    waiting.start()
    mailbox.cancel("g")
    waiting.join(10.0)
    assert found == [None]
    assert mailbox.is_cancelled("g")
    mailbox.forget("g")
    assert not mailbox.is_cancelled("g")
    assert mailbox.get("g", "0", 0.0) is None


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


def test_manifests_are_plain_json(make_server):
    server = make_server()
    server.outer.publish(Snapshot(2, 7, {"a": ServedArray(np.zeros((2, 3), np.int8), 4)}, {"tokens": 5}))
    manifest = PeerClient(server.address, TOKEN, 5.0).request("GET", "/manifest")
    assert json.loads(json.dumps(manifest)) == manifest
    leaf = manifest["leaves"]["a"]
    assert (manifest["generation"], manifest["round"], manifest["facts"]) == (2, 7, {"tokens": 5})
    assert (leaf["dtype"], leaf["shape"], leaf["bytes"], leaf["version"]) == ("int8", [2, 3], 6, 4)
