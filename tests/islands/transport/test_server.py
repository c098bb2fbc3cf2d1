"""A host's server: what it answers to its fleet, and how it refuses everybody else."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
import weakref
from contextlib import suppress

import numpy as np
import pytest

from gregale.distributed.signing import read_token, sign
from gregale.errors import UserError
from gregale.islands.transport import listener, snapshot_store
from gregale.islands.transport import server as module
from gregale.islands.transport.client import PeerClient, RequestRejected, post
from gregale.islands.transport.server import PeerUnreachable, Server, Snapshot, ask_status, call
from gregale.islands.transport.signing import digest
from gregale.islands.transport.snapshot_store import ServedArray
from tests.islands.transport.conftest import TOKEN

UNSIGNED = "its signature is missing or wrong: it has another token, or was meant for another server"
NOTHING = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def test_messages_and_status(make_server):
    server = make_server(on_message=lambda message: {"heard": message}, status=lambda: {"step": 12})
    assert call(server.address, TOKEN, {"kind": "due", "round": 5}, 5.0) == {"heard": {"kind": "due", "round": 5}}
    assert ask_status(server.address, TOKEN, 5.0) == {"step": 12}


def test_a_rejection_has_a_reason(make_server):
    def refuse(message):
        raise RequestRejected("round 3 is over")

    server = make_server(on_message=refuse)
    with pytest.raises(RequestRejected, match=r"refuses: round 3 is over"):
        call(server.address, TOKEN, {}, 5.0)
    with pytest.raises(RequestRejected, match=r"there is no state here yet"):
        PeerClient(server.address, TOKEN, 5.0).request("GET", "/manifest")
    with pytest.raises(RequestRejected, match=r"nothing at this path"):
        PeerClient(server.address, TOKEN, 5.0).request("GET", "/../etc/passwd")


def test_another_token_gets_nothing(make_server):
    server = make_server(on_message=lambda message: pytest.fail("it was taken"))
    with pytest.raises(PeerUnreachable, match=r"it has another token"):
        call(server.address, b"another token here", {"kind": "due"}, 5.0)
    assert server.complaints == [f"127.0.0.1 was refused: {UNSIGNED}"]


def test_a_server_without_the_token_is_not_believed(make_server):
    other = make_server(token=b"another token here", on_message=lambda message: {"round": 99})
    with pytest.raises(PeerUnreachable, match=r"it has another token"):
        call(other.address, TOKEN, {}, 5.0)


def test_no_server_listens(make_server):
    server = make_server()
    server.close()
    with pytest.raises(PeerUnreachable, match=rf"{server.host}:{server.port} cannot be reached: .*refused"):
        call(server.address, TOKEN, {}, 5.0)


def raw(server: Server, method: str, path: str, body: bytes, moment: float, nonce: str, **more: str) -> bytes:
    """The status line and the rest of what a server answers to a request of our own making, signed for it."""
    return exchange(server, written(server, method, path, body, moment, nonce, **more))


def written(server: Server, method: str, path: str, body: bytes, moment: float, nonce: str, **more: str) -> bytes:
    """A request as it is on the wire."""
    hashed = digest(body)
    parts = server.recipient, method, path, f"{moment:.3f}", nonce, hashed
    headers = {
        "X-Nonce": nonce,
        "X-Time": f"{moment:.3f}",
        "X-Body": hashed,
        "X-Signature": sign(TOKEN, *(part.encode() for part in parts)),
        "Content-Length": str(len(body)),
        "Connection": "close",
        **more,
    }
    text = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return text.encode() + b"\r\n" + body


def exchange(server: Server, content: bytes) -> bytes:
    """All that a server answers to these bytes."""
    with socket.create_connection((server.host, server.port), 5.0) as connection:
        connection.sendall(content)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_a_captured_request_cannot_be_replayed(make_server):
    taken = []
    server = make_server(on_message=lambda message: taken.append(message) or {})
    now = time.time()
    assert b" 200 " in raw(server, "POST", "/message", b"{}", now, "n1")
    assert b"was already used" in raw(server, "POST", "/message", b"{}", now, "n1")
    assert b"clock is 1000 s away" in raw(server, "POST", "/message", b"{}", now - 1000, "n2")
    assert raw(server, "POST", "/message", b"{}", now, "n3", **{"X-Nonce": "n4"}) == NOTHING
    assert raw(server, "POST", "/message", b"{}", now, "n5", **{"X-Body": digest(b"[]")}) == NOTHING
    assert len(taken) == 1


def test_a_request_to_one_island_is_refused_by_every_other(make_server):
    """Also by the same one after a restart at the same address."""
    taken = []
    one = make_server(on_message=lambda message: taken.append(message) or {})
    other = make_server(on_message=lambda message: pytest.fail("it was taken"))
    captured = written(one, "POST", "/message", b"{}", time.time(), "n1")
    assert exchange(other, captured) == NOTHING
    assert other.complaints == [f"127.0.0.1 was refused: {UNSIGNED}"]
    assert b" 200 " in exchange(one, captured), "it was right for the one that it was sent to"
    one.close()
    again = Server(f"{one.host}:{one.port}", TOKEN, lambda message: pytest.fail("it was taken"))
    assert exchange(again, captured) == NOTHING
    again.close()


def test_a_restarted_peer_has_another_identity(make_server):
    one = make_server()
    former = one.address
    one.close()
    again = Server(f"{one.host}:{one.port}", TOKEN, dict)
    with pytest.raises(PeerUnreachable, match=r"started again"):
        call(former, TOKEN, {}, 5.0)
    assert call(again.address, TOKEN, {}, 5.0) == {}
    again.close()


def test_a_body_that_is_too_large_or_another_is_refused(make_server):
    server = make_server(on_message=lambda message: pytest.fail("it was taken"))
    now = time.time()
    lengths = {"n1": "1000000000000", "n2": "-1", "n3": "1e3"}
    for nonce, length in lengths.items():
        assert b"at most 1048576" in raw(server, "POST", "/message", b"{}", now, nonce, **{"Content-Length": length})
    assert b"not the one that was signed" in raw(
        server, "POST", "/message", b"{}x", now, "n4", **{"X-Body": digest(b"{}"), "X-Signature": forged(server, now)}
    )
    assert b"a message is a JSON object" in raw(server, "POST", "/message", b"[1]", now, "n5")


def forged(server: Server, now: float) -> str:
    parts = server.recipient, "POST", "/message", f"{now:.3f}", "n4", digest(b"{}")
    return sign(TOKEN, *(part.encode() for part in parts))


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
    with socket.create_connection((server.host, server.port), 5.0) as connection:
        connection.sendall(garbage)
        with suppress(ConnectionResetError):  # it may close before it has read everything
            assert connection.recv(100) == b""
    assert len(server.complaints) == 1
    assert "does not speak HTTP" in server.complaints[0]
    assert call(server.address, TOKEN, {}, 5.0) == {}


def test_silent_and_slow_connections_are_closed(make_server, monkeypatch):
    monkeypatch.setattr(listener, "IDLE_SECONDS", 0.4)
    server = make_server()
    with (
        socket.create_connection((server.host, server.port), 5.0) as silent,
        socket.create_connection((server.host, server.port)) as slow,
    ):
        for _ in range(100):
            try:
                slow.sendall(b"G")
            except OSError:
                break
            time.sleep(0.1)
        else:
            pytest.fail("it may go on for ever")
        assert silent.recv(10) == b""
    assert call(server.address, TOKEN, {}, 5.0) == {}


def test_an_authenticated_client_may_wait_long_for_an_answer(make_server, monkeypatch):
    """The copy of an inner optimizer comes at the end of a step."""
    monkeypatch.setattr(listener, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.2)
    answered = threading.Event()
    server = make_server(on_message=lambda message: {"late": not answered.wait(0.6)})
    assert call(server.address, TOKEN, {"kind": "inner"}, 20.0) == {"late": True}


def test_unidentified_connections_take_no_slot_of_the_fleet(make_server, monkeypatch):
    monkeypatch.setattr(listener, "MAX_UNIDENTIFIED", 3)
    server, before = make_server(), set(threading.enumerate())  # threads of another test's server may still end
    known = PeerClient(server.address, TOKEN, 5.0)
    known.request("GET", "/status")
    held = [socket.create_connection((server.host, server.port), 5.0) for _ in range(4)]
    assert held[0].recv(1) == b"", "the oldest makes place for the newest"
    threads = [thread for thread in set(threading.enumerate()) - before if "process_request" in thread.name]
    assert len(threads) <= 3 + 1 + 1
    assert known.request("GET", "/status") == {}
    assert call(server.address, TOKEN, {}, 5.0) == {}
    assert "3 connections have brought no request" in server.complaints[0]
    known.close()
    for connection in held:
        connection.close()


def test_the_address_with_the_most_unidentified_connections_loses_one(make_server, monkeypatch):
    monkeypatch.setattr(listener, "MAX_UNIDENTIFIED", 3)
    server = make_server()
    with socket.create_connection((server.host, server.port), 5.0, ("127.0.0.2", 0)) as lonely:
        held = [socket.create_connection((server.host, server.port), 5.0) for _ in range(6)]
        assert held[3].recv(1) == b""
        lonely.sendall(b"POST")
        lonely.settimeout(0.2)
        with pytest.raises(TimeoutError):
            lonely.recv(1)
        for connection in held:
            connection.close()


def test_a_previous_snapshot_is_freed(make_server, monkeypatch):
    """An outer side that somebody has fetched once would else be there twice from then on."""
    monkeypatch.setattr(snapshot_store, "LEASE_SECONDS", 0.0)
    server, array = make_server(), np.ones(5, np.float32)
    server.publish(Snapshot(0, 1, {"a": ServedArray(array, 1)}))
    peer = PeerClient(server.address, TOKEN, 5.0)
    leaf = peer.request("GET", "/manifest")["leaves"]["a"]
    assert peer.open_chunks([(leaf["hash"], 0)], array.nbytes)
    peer.read_into(memoryview(bytearray(array.nbytes)))
    peer.request("GET", "/manifest")  # the server has nothing more to do with the request before
    peer.close()
    gone = weakref.ref(array)
    del array
    server.publish(Snapshot(0, 2, {"a": ServedArray(np.ones(3, np.float32), 2)}))
    gc.collect()
    assert gone() is None


def test_a_fetch_of_a_previous_snapshot_can_finish_and_then_the_snapshot_is_freed(make_server, monkeypatch):
    server = make_server()
    first, second = np.arange(8, dtype=np.float32), np.ones(8, np.float32)
    server.publish(Snapshot(0, 1, {"a": ServedArray(first, 1)}))
    peer = PeerClient(server.address, TOKEN, 5.0)
    manifest = peer.request("GET", "/manifest")
    server.publish(Snapshot(0, 2, {"a": ServedArray(second, 2)}))
    assert peer.request("GET", "/manifest")["round"] == 2
    got = bytearray(first.nbytes)
    chunk = manifest["leaves"]["a"]["hash"], 0
    assert peer.open_chunks([chunk], first.nbytes)
    peer.read_into(memoryview(got))
    assert bytes(got) == first.tobytes()
    monkeypatch.setattr(snapshot_store, "LEASE_SECONDS", 0.0)
    server.publish(Snapshot(0, 3, {"a": ServedArray(second, 2)}))
    assert not peer.open_chunks([chunk], first.nbytes)
    peer.close()


def test_values_for_a_group_are_limited(make_server):
    server = make_server()
    message = {"group": "g", "key": "0", "value": "00" * 70_000}
    with pytest.raises(RequestRejected, match=r"no room for this value"):
        post(server.address, TOKEN, "/store", message, 5.0)
    post(server.address, TOKEN, "/store", message | {"value": "0102"}, 5.0)
    assert server.mailbox.get("g", "0", 1.0) == b"\x01\x02"
    server.mailbox.forget("g")
    assert server.mailbox.get("g", "0", 0.0) is None


def test_an_address_in_use(make_server):
    server = make_server()
    with pytest.raises(UserError, match=r"islands.bind: .* cannot be listened at \(Address already in use\)"):
        Server(f"{server.host}:{server.port}", TOKEN, dict)


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
    with pytest.raises(UserError, match=r"has 5 bytes; at least 16"):
        read_token(path, "islands.token_file")


def test_manifests_are_plain_json(make_server):
    server = make_server()
    server.publish(Snapshot(2, 7, {"a": ServedArray(np.zeros((2, 3), np.int8), 4)}, {"tokens": 5}))
    manifest = PeerClient(server.address, TOKEN, 5.0).request("GET", "/manifest")
    assert json.loads(json.dumps(manifest)) == manifest
    leaf = manifest["leaves"]["a"]
    assert (manifest["generation"], manifest["round"], manifest["facts"]) == (2, 7, {"tokens": 5})
    assert (leaf["dtype"], leaf["shape"], leaf["bytes"], leaf["version"]) == ("int8", [2, 3], 6, 4)
