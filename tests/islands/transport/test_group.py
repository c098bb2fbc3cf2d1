"""Groups of Gloo: messages, and what everybody sees when one goes. Members are threads of this process here."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gregale.islands.transport.group import CONNECTING, Connecting, Count, Group, GroupFailed

Build = Callable[..., list[Group]]


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
        with ThreadPoolExecutor(size) as threads:
            built = [
                threads.submit(Group.build, key, rank, hosts, servers[rank], timeout_seconds, names)
                for rank in range(size)
                if rank not in absent
            ]
        groups.extend(each.result() for each in built if each.exception() is None)
        assert all(server.mailbox._values == {} for rank, server in enumerate(servers) if rank not in absent)
        return [each.result() for each in built]

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


def test_the_error_for_a_dead_peer_has_its_name_and_no_text_of_gloo(build, caplog):
    with caplog.at_level(logging.DEBUG, "gregale.islands.transport.group"):
        oslo, turin = build(2, names=["oslo", "turin"])
        under_way = oslo.recv(1, np.zeros(5, np.uint8))
        turin.drop()
        with pytest.raises(GroupFailed) as failed:
            under_way.wait(20.0)
        oslo.drop()
    closed = "receiving from turin failed: it closed the connection"
    assert str(failed.value) in (closed, "the connection to turin has ended"), "whichever wait sees it first"
    assert caplog.records, "Gloo's words are kept for who looks for a fault"


def test_a_silent_member_fails_the_group(build):
    groups = build(3)
    begin = time.monotonic()
    with pytest.raises(GroupFailed, match=r"receiving from 127.0.0.1:\d+ took more than 0.3 s"):
        groups[0].recv(1, np.zeros(1, np.uint8)).wait(0.3)
    for group in groups[1:]:
        with pytest.raises(GroupFailed):
            group.recv((group.rank + 1) % 3, np.zeros(1, np.uint8)).wait(20.0)
    assert time.monotonic() - begin < 10.0


def test_a_dropped_group_leaves_no_sockets_or_threads(build):
    for group in (*build(1), *build(2)):
        group.drop()
        assert group.failure
    groups = build(3)
    before = len(os.listdir("/proc/self/task"))
    for group in groups:
        group.drop()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("gregale-g")]
    assert len(os.listdir("/proc/self/task")) < before


def test_a_member_that_does_not_exist_or_does_not_join(build, make_server):
    with pytest.raises(GroupFailed, match=r"The group of 3 has not come together: .*cannot be reached: .*refused"):
        build(3, absent=(1,), timeout_seconds=0.3)
    one, other = make_server(), make_server()
    late = rf"has not come together: {other.address.partition('/')[0]} did not come within 0.2 s"
    with pytest.raises(GroupFailed, match=late):
        Group.build("k", 0, [one.address, other.address], one, 0.2)


def test_a_cancelled_group_returns_at_once_although_gloo_waits(make_server, monkeypatch):
    """Gloo's connecting takes 25 s where a member gave up, and cannot be stopped."""
    server, begun, goes_on = make_server(), threading.Event(), threading.Event()

    def connected(*_: object) -> None:
        begun.set()
        goes_on.wait()
        raise RuntimeError("it timed out")

    monkeypatch.setattr(Connecting, "_connected", connected)
    with ThreadPoolExecutor(1) as threads:
        built = threads.submit(Group.build, "key", 0, [server.address, "127.0.0.1:9"], server, 60.0)
        try:
            assert begun.wait(60.0)
            server.mailbox.cancel("key")
            with pytest.raises(GroupFailed, match="cancelled"):
                built.result(30.0)
        finally:
            goes_on.set()
    for connecting in list(CONNECTING):
        connecting.join()
    assert not server.mailbox.is_cancelled("key"), "it is forgotten when nothing is under way any more"


def test_unknown_connections_to_gloo_do_no_harm(build):
    before = listening()
    groups = build(2)
    doors = listening() - before
    assert {host for host, _ in doors} == {"127.0.0.1"}
    for door in doors:
        with socket.create_connection(door, 5.0) as stranger:
            stranger.sendall(os.urandom(4096))
    buffer = np.zeros(3, np.uint8)
    work = groups[1].recv(0, buffer)
    groups[0].send(1, np.arange(3, dtype=np.uint8)).wait(10.0)
    work.wait(10.0)
    assert list(buffer) == [0, 1, 2]


def listening() -> set[tuple[str, int]]:
    """Addresses that this process listens at."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    found = set()
    with open("/proc/self/net/tcp") as table:
        for fields in (line.split() for line in list(table)[1:]):
            address, port = fields[1].split(":")
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found
