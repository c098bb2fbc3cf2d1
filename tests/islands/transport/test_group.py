"""Groups: messages, and what everybody sees when one goes. Members are threads of this process here."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest

from gregale.islands.transport.client import PeerClient, PeerUnreachable, RequestRejected, call
from gregale.islands.transport.group import Count, Group, GroupFailed
from tests.islands.transport.conftest import TOKEN, received
from tests.ports import listening
from tests.recorder import Recorder

Build = Callable[..., list[Group]]
SMALL = np.arange(99, dtype=np.uint8)


@pytest.fixture
def build(make_server) -> Iterator[Build]:
    """`build(size, absent=())`: the members of a new group that are not absent, in the order of their ranks."""
    groups: list[Group] = []
    count = iter(range(100))

    def make(size: int, absent: tuple[int, ...] = (), timeout_seconds: float = 10.0, names=()) -> list[Group]:
        servers = [make_server() for _ in range(size)]
        hosts = [server.address for server in servers]
        for rank in absent:
            servers[rank].close()
        key = f"group {next(count)}"
        made = [Group(key, rank, hosts, servers[rank], names) for rank in range(size) if rank not in absent]
        groups.extend(made)
        with ThreadPoolExecutor(size) as threads:
            list(threads.map(lambda group: group.connect(timeout_seconds), made))
        return made

    yield make
    for group in groups:
        group.drop()


def test_messages_arrive_by_tag_and_in_order(build):
    groups = build(3)
    random = np.random.default_rng(0)
    sent = {(a, b, tag): random.integers(0, 256, 999, np.uint8) for a in range(3) for b in range(3) for tag in range(4)}
    sent = {key: message for key, message in sent.items() if key[0] != key[1]}
    for message in sent.values():
        message.flags.writeable = False  # as a view of an array of JAX is
    works = [groups[a].send(b, message, tag) for (a, b, tag), message in sent.items()]
    arrived = {key: np.zeros(999, np.uint8) for key in sent}
    works += [groups[b].recv(a, arrived[a, b, tag], tag) for a, b, tag in reversed(list(sent))]
    for work in works:
        work.wait(10.0)
        work.wait(10.0)
    for key, message in sent.items():
        np.testing.assert_array_equal(arrived[key], message)
    for size in (1, 2, 0):
        groups[0].send(1, np.full(size, size, np.uint8))
    for size in (1, 2, 0):
        buffer = np.zeros(size, np.uint8)
        groups[1].recv(0, buffer).wait(10.0)
        assert (buffer == size).all()


def test_many_large_messages_in_flight(build):
    groups = build(2)
    message, arrived = np.arange(2**22, dtype=np.uint32).view(np.uint8), np.zeros(2**24, np.uint8)
    spans = [slice(start, start + 2**18) for start in range(0, 2**24, 2**18)]
    works = [groups[0].send(1, message[span], tag) for tag, span in enumerate(spans)]
    works += [groups[1].recv(0, arrived[span], tag) for tag, span in enumerate(spans)]
    for work in works:
        work.wait(20.0)
    assert np.array_equal(message, arrived)
    assert (groups[0].count, groups[1].count) == (Count(sent=2**24), Count(received=2**24))


def test_all_members_notice_when_one_drops_the_group(build):
    groups = build(4)
    pairs = [(group, peer) for group in groups for peer in range(4) if peer != group.rank]
    works = [group.recv(peer, np.zeros(5, np.uint8), tag=9) for group, peer in pairs]
    with ThreadPoolExecutor(len(works)) as threads:
        waits = [threads.submit(work.wait, 20.0) for work in works]
        time.sleep(0.1)
        begin = time.monotonic()
        groups[2].drop()
        reasons = {str(wait.exception()) for wait in waits}
    assert time.monotonic() - begin < 10.0
    assert "the group was dropped here" in reasons
    assert all("\n" not in reason and len(reason) < 300 for reason in reasons)
    for group in groups:
        with pytest.raises(GroupFailed):
            group.send(0, np.zeros(1, np.uint8))
        assert group.failure
        group.drop()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Group.drop, "the connection to turin has ended"),
        (lambda turin: turin.send(0, np.zeros(6, np.uint8)), "turin sends 6 bytes where 5 are expected"),
    ],
)
def test_a_peer_that_is_dead_or_sends_another_size_fails_the_group_by_name(build, fault, reason):
    oslo, turin = build(2, names=["oslo", "turin"])
    under_way = oslo.recv(1, np.zeros(5, np.uint8))
    fault(turin)
    with pytest.raises(GroupFailed, match=f"^{reason}$"):
        under_way.wait(20.0)


def test_a_silent_member_fails_the_group(build):
    groups = build(3)
    begin = time.monotonic()
    with pytest.raises(GroupFailed, match=r"receiving from 127.0.0.1:\d+ took more than 0.3 s"):
        groups[0].recv(1, np.zeros(1, np.uint8)).wait(0.3)
    for group in groups[1:]:
        with pytest.raises(GroupFailed):
            group.recv((group.rank + 1) % 3, np.zeros(1, np.uint8)).wait(20.0)
    assert time.monotonic() - begin < 10.0


def test_a_member_that_stops_reading_fails_the_group(build):
    """As a stopped process does, whose system takes some megabytes more."""
    groups = build(2)
    with pytest.raises(GroupFailed, match=r"sending to 127.0.0.1:\d+ took more than 0.3 s"):
        groups[0].send(1, np.zeros(2**26, np.uint8)).wait(0.3)
    with pytest.raises(GroupFailed, match="has ended"):
        groups[1].recv(0, np.zeros(2**26, np.uint8)).wait(20.0)


def test_a_dropped_group_leaves_no_sockets_or_threads(build):
    build(1)[0].drop()
    groups = build(3)
    used = [thread for thread in threading.enumerate() if "gregale-group" in thread.name]
    streams = [stream for group in groups for stream in group._streams.values()]
    assert (len(used), len(streams)) == (6, 12)
    for group in groups:
        group.drop()
    for thread in used:
        thread.join(10.0)
        assert not thread.is_alive()
    assert all(group._streams == {} and group._server.groups._receivers == {} for group in groups)


def test_a_member_that_does_not_exist_or_does_not_join_and_a_group_that_is_dropped_before(build, make_server):
    with pytest.raises(GroupFailed, match=r"The group of 3 has not come together: .*cannot be reached: .*refused"):
        build(3, absent=(1,), timeout_seconds=0.3)
    servers = [make_server() for _ in range(3)]
    servers[1].close()
    hosts = [server.address for server in servers]
    first, last = (Group("three", rank, hosts, servers[rank]) for rank in (0, 2))
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(first.connect, 0.3), threads.submit(last.connect, 60.0)]
    for wait in waits:  # the second sees the end of its connection to the first, which is not the cause
        assert f"{servers[1].host}:{servers[1].port} cannot be reached" in str(wait.exception())
    one, other = make_server(), make_server()
    late = rf"has not come together: {other.address.partition('/')[0]} did not come within 0.2 s"
    with pytest.raises(GroupFailed, match=late):
        Group("k", 0, [one.address, other.address], one).connect(0.2)
    group = Group("key", 0, [one.address, other.address], one)
    with ThreadPoolExecutor(1) as threads:
        built = threads.submit(group.connect, 60.0)
        group.drop()
        with pytest.raises(GroupFailed, match="has not come together: the group was dropped here"):
            built.result(30.0)  # at once


def test_only_expected_members_are_admitted_and_once(build, make_server):
    groups = build(2)
    server = groups[0]._server
    for rank in (0, 1, 2, "1"):  # itself, a member that is here, and two that are not of the group
        with closing(PeerClient(server.address, TOKEN, 5.0)) as client:
            stream = client.open_stream({"group": groups[0]._key, "rank": rank, "seconds": 1.0}, 5.0)
            assert stream.recv(1) == b""
            stream.close()
    with (
        closing(PeerClient(server.address, TOKEN, 5.0)) as client,
        pytest.raises(RequestRejected, match="the group has not come together here"),
    ):
        client.open_stream({"group": "another", "rank": 1, "seconds": 0.0}, 5.0)
    assert_carries(groups)


def test_strangers_at_every_port_do_no_harm_and_learn_nothing(make_server, monkeypatch):
    """One of them is on the way: it records all bytes, and sends them again."""
    monkeypatch.setattr("gregale.islands.transport.listener.MAX_UNIDENTIFIED", 32)
    servers = [make_server(), make_server()]
    with Recorder(servers[1].host, servers[1].port) as recorder, ExitStack() as stack:
        hosts = [servers[0].address, f"{recorder.address}/{servers[1].recipient}"]
        groups = [Group("key", rank, hosts, server) for rank, server in enumerate(servers)]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda group: group.connect(20.0), groups))
        secret = np.frombuffer(b"weights of the model" * 50, np.uint8)
        assert_carries(groups, secret)
        answers = []
        addresses = {(server.host, server.port) for server in servers}
        assert listening() >= addresses
        for address in addresses:
            for content in (*map(bytes, recorder.recorded), os.urandom(4096), b"POST / HTTP/1.1\r\n\r\n", b"\x16\x03"):
                answers.append(stack.enter_context(socket.create_connection(address, 5.0)))
                answers[-1].sendall(content)
            with pytest.raises(PeerUnreachable, match="it has another token"):
                call(f"{address[0]}:{address[1]}", b"another token here", {}, 5.0)
            for _ in range(100):
                stack.enter_context(socket.create_connection(address, 5.0))
        learnt = b"".join([*recorder.recorded, *map(received, answers)])
        assert len(recorder.recorded) == 2
        assert len(learnt) > len(secret)
        for word in (bytes(secret[:20]), b"HTTP", b"stream", TOKEN):
            assert word not in learnt
        assert_carries(groups, secret)
        for group in groups:
            group.drop()


def assert_carries(groups: list[Group], message: np.ndarray = SMALL) -> None:
    """Every message between two members arrives."""
    for sender, receiver in (groups, groups[::-1]):
        buffer = np.zeros_like(message)
        work = receiver.recv(sender.rank, buffer, tag=7)
        sender.send(receiver.rank, message, tag=7).wait(20.0)
        work.wait(20.0)
        assert np.array_equal(buffer, message)
