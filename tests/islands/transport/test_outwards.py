"""Hosts to which nobody connects: requests, messages and states reach them over connections that they have opened.

Nothing here connects to such a host, because its address has no port; `benchmarks.paths` has a NAT.
"""

import math
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import repeat

import numpy as np
import pytest

from gregale.islands.driver import dead_peers
from gregale.islands.protocol.messages import LAN, Peer, unpack
from gregale.islands.transport import outwards
from gregale.islands.transport.client import PeerClient, PeerUnreachable, ask_status
from gregale.islands.transport.coordinator import CoordinatorClient
from gregale.islands.transport.group import Group, GroupFailed
from gregale.islands.transport.lighthouse import Lighthouse
from gregale.islands.transport.transfer import Fetcher, Snapshot, VersionedArray
from tests.islands.transport.conftest import TOKEN
from tests.ports import free_port

SECONDS = 10.0


@pytest.fixture
def sites(make_server):
    """A coordinator, an open host, and two that only connect outwards; each knows the others."""
    relay = make_server(recipient="lighthouse", relays=4)
    hosts = [make_server(address=address) for address in (None, "outwards", "outwards")]
    for host in hosts:
        host.paths.update(host.address, [each.address for each in hosts if each is not host], relay.address)
    return relay, hosts


def test_requests_reach_hosts_that_only_connect_outwards(sites):
    relay, hosts = sites
    for host in hosts:
        host.status = lambda host=host: {"recipient": host.recipient}
    for asking in hosts:
        for asked in hosts:
            if asked is not asking:
                for _ in range(2 * outwards.PARKED):  # connections that were used are replaced
                    found = ask_status(asked.address, TOKEN, SECONDS, asking.paths.dial)
                    assert found == {"recipient": asked.recipient}
    assert dead_peers([Peer("a", "1", (hosts[1].address,))]) == frozenset()
    with closing(hosts[1].paths.dial(hosts[2].recipient, SECONDS)):
        deadlines = [deadline for _, deadline in relay._http._identified.values()]
    assert deadlines.count(math.inf) == 2, "a relay has no deadline on either side"


def test_a_group_exchanges_messages_and_ends_together(sites):
    _, hosts = sites
    addresses = [host.address for host in hosts]
    groups = [Group("key", rank, addresses, host) for rank, host in enumerate(hosts)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda group: group.connect(SECONDS), groups))
    sent = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    arrived = {pair: np.zeros_like(sent) for pair in pairs}
    works = [groups[a].send(b, sent) for a, b in pairs] + [groups[b].recv(a, arrived[a, b]) for a, b in pairs]
    for work in works:
        work.wait(SECONDS)
    assert all(np.array_equal(each, sent) for each in arrived.values())
    waiting = groups[0].recv(1, np.zeros(1, np.uint8))
    groups[2].drop()
    with pytest.raises(GroupFailed):
        waiting.wait(SECONDS)
    groups[1].drop()


def test_a_relay_ends_when_a_side_takes_nothing_more(sites, monkeypatch):
    monkeypatch.setattr(outwards, "TAKE_SECONDS", 0.2)
    relay, hosts = sites
    frozen = threading.Event()
    hosts[2].groups.add("key", lambda rank, stream: frozen.wait())
    greeting = {"group": "key", "rank": 0, "seconds": SECONDS}
    with closing(PeerClient(hosts[2].address, TOKEN, SECONDS, hosts[1].paths.dial)) as client:
        stream = client.open_stream(greeting, SECONDS)
    stream.settimeout(SECONDS)
    with closing(stream), pytest.raises((ConnectionError, ssl.SSLError)):
        any(map(stream.sendall, repeat(bytes(1 << 20))))
    assert all(relay.relays.acquire(timeout=SECONDS) for _ in range(4))
    frozen.set()


def test_a_state_is_fetched_through_the_relay_and_the_relay_cannot_read_it(sites, monkeypatch):
    _, hosts = sites
    passed = bytearray()

    def copy(source, target) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                passed.extend(content)
                target.sendall(content)
        outwards.shut(source)
        outwards.shut(target)

    monkeypatch.setattr(outwards, "copy", copy)
    array = np.frombuffer(b"the text of a state of an island" * 4096, np.uint8)
    hosts[1].outer.publish(Snapshot(1, 1, {"leaf": VersionedArray(array, 1)}, {}))
    with closing(Fetcher(TOKEN, {"leaf": (array.shape, array.dtype)}, dial=hosts[2].paths.dial)) as fetcher:
        fetched = fetcher.fetch([hosts[1].address], SECONDS)
    assert np.array_equal(fetched.arrays["leaf"], array)
    assert len(passed) > array.nbytes
    assert array.tobytes()[:64] not in passed
    assert b"/manifest" not in passed


def test_a_host_that_has_gone_and_a_full_relay_are_unreachable(sites, make_server):
    relay, hosts = sites
    ask_status(hosts[1].address, TOKEN, SECONDS, hosts[0].paths.dial)
    hosts[1].close()
    for asking in (hosts[0], hosts[2]):
        with pytest.raises(PeerUnreachable):
            ask_status(hosts[1].address, TOKEN, 0.5, asking.paths.dial)
    for _ in range(4):
        relay.relays.acquire()
    joiner = make_server(address="outwards")
    joiner.paths.update(joiner.address, [], relay.address)
    with pytest.raises(PeerUnreachable, match="relays no more"):
        ask_status(hosts[2].address, TOKEN, SECONDS, joiner.paths.dial)


def test_a_parked_connection_whose_host_has_gone_is_passed_over():
    parking, call = outwards.Parking(), outwards.Call(False, print)
    (gone, other), (here, _peer) = socket.socketpair(), socket.socketpair()
    other.close()
    slots = [outwards._Slot(each) for each in (gone, here)]
    parking._slots["oslo"].extend(slots)
    assert parking.take("oslo", call, SECONDS)
    assert [slot.call for slot in slots] == [None, call]


def test_the_coordinator_finds_the_hosts_that_it_does_not_reach(make_server):
    hosts = [make_server().address, f"127.0.0.1:{free_port()}/abcd", "outwards:ef/ef", "a:b/c", "nonsense"]
    with closing(Lighthouse("127.0.0.1:0", TOKEN)) as up, closing(CoordinatorClient(up.address, "a", TOKEN, LAN)) as a:
        _, columns, _ = a.ask({"hosts": hosts}, 1)
    assert unpack(columns, "hosts") == [[hosts[0], "outwards:abcd/abcd", "outwards:ef/ef", "outwards:c/c", "nonsense"]]
