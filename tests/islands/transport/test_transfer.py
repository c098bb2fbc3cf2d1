"""Healing: fetching a state from peers that die, stall, lie or go on training meanwhile."""

import copy
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

import ml_dtypes
import numpy as np
import pytest

from gregale.distributed.agreement import canonical
from gregale.islands.transport import client, transfer
from gregale.islands.transport.client import RequestRejected
from gregale.islands.transport.server import Handler, Server
from tests.islands.transport.conftest import TOKEN
from tests.recorder import Recorder

CHUNK_BYTES = 1 << 16
SIZE = 10 * CHUNK_BYTES // 4 + 77


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Use chunks of 64 kB, and short timeouts."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(transfer, "STALL_SECONDS", 0.4)
    monkeypatch.setattr(transfer, "SLOW_SECONDS", 0.2)


def leaves(seed: int = 0, version: int = 4) -> dict[str, transfer.VersionedArray]:
    random = np.random.default_rng(seed)
    return {
        "large|0": transfer.VersionedArray(random.standard_normal(SIZE).astype(np.float32), version),
        "matrix|0": transfer.VersionedArray(random.integers(0, 9, (3, 5)).astype(np.int32), version),
        "half|0": transfer.VersionedArray(random.standard_normal((2, 7)).astype(ml_dtypes.bfloat16), version),
        "count|0": transfer.VersionedArray(np.asarray(seed, np.int64), version),
        "empty|0": transfer.VersionedArray(np.zeros((0, 3), np.float32), version),
    }


STATE = leaves()
TOTAL = sum(leaf.array.nbytes for leaf in STATE.values())
EXPECTED = {name: (leaf.array.shape, leaf.array.dtype) for name, leaf in STATE.items()}


def fetch(sources, token, expected, timeout_seconds, held=None) -> transfer.Fetched:
    with closing(transfer.Fetcher(token, expected, held)) as fetcher:
        return fetcher.fetch(sources, timeout_seconds)


def assert_is(fetched: transfer.Fetched, expected: dict[str, transfer.VersionedArray]) -> None:
    assert set(fetched.arrays) == set(expected)
    for name, leaf in expected.items():
        np.testing.assert_array_equal(fetched.arrays[name], leaf.array)
        assert fetched.arrays[name].dtype == leaf.array.dtype
    assert fetched.offer.versions == {name: leaf.version for name, leaf in expected.items()}


@pytest.fixture
def fetcher() -> Iterator[transfer.Fetcher]:
    with closing(transfer.Fetcher(TOKEN, EXPECTED)) as made:
        yield made


@pytest.fixture
def sources(make_server) -> list[Server]:
    servers = [make_server() for _ in range(3)]
    for server in servers:
        server.outer.publish(transfer.Snapshot(1, 4, STATE, {"position": 17}))
    return servers


@pytest.fixture
def spoilt(monkeypatch) -> Callable[..., str]:
    """`spoilt(server, how)`: the address of the server, which sends `how(chunk, number)` for a chunk; None: it ends."""
    send, spoilers, counts = Handler._send_all, {}, Counter()

    def send_all(handler: Handler, content) -> None:
        address = handler.owner.address
        if handler.path == "/pieces" and address in spoilers:
            counts[address] += 1
            whole, content = content, spoilers[address](bytes(content), counts[address])
            if content is None:
                send(handler, whole[:100])
                raise ConnectionError
        send(handler, content)

    def install(server: Server, how: Callable[[bytes, int], bytes | None]) -> str:
        spoilers[server.address] = how
        return server.address

    monkeypatch.setattr(Handler, "_send_all", send_all)
    return install


def slow(seconds: float) -> Callable[[bytes, int], bytes]:
    def wait(content: bytes, number: int) -> bytes:
        time.sleep(seconds)
        return content

    return wait


@pytest.fixture
def after_chunks(monkeypatch) -> Callable[[Callable[[int], None]], None]:
    """`after_chunks(action)`: calls `action` with the number of received bytes after each chunk."""

    def install(action: Callable[[int], None]) -> None:
        put = transfer.Assembly.put

        def put_and_act(assembly: transfer.Assembly, *arguments) -> bool:
            result = put(assembly, *arguments)
            action(assembly.received_bytes)
            return result

        monkeypatch.setattr(transfer.Assembly, "put", put_and_act)

    return install


def test_fetching_from_one_and_from_several_sources(sources):
    for count in (1, 3):
        fetched = fetch([server.address for server in sources[:count]], TOKEN, EXPECTED, 10.0)
        assert_is(fetched, STATE)
        assert fetched.received_bytes == TOTAL
        assert (fetched.offer.generation, fetched.offer.round, fetched.offer.facts) == (1, 4, {"position": 17})
    wrong = f"{sources[0].address.partition('/')[0]}/m:another"  # that of another one
    assert_is(fetch([wrong, sources[0].address], TOKEN, EXPECTED, 10.0), STATE)


def test_many_small_arrays_take_few_requests(make_server, monkeypatch):
    """Each request costs a round trip: seconds between sites, if there were one for each array."""
    server = make_server()
    many = {f"array{number}|0": transfer.VersionedArray(np.full(5, number, np.float32), 1) for number in range(200)}
    server.outer.publish(transfer.Snapshot(1, 4, many))
    requests, open_chunks = [], client.PeerClient.open_chunks
    monkeypatch.setattr(client.PeerClient, "open_chunks", lambda *all: requests.append(all) or open_chunks(*all))
    expected = {name: (leaf.array.shape, leaf.array.dtype) for name, leaf in many.items()}
    assert_is(fetch([server.address], TOKEN, expected, 10.0), many)
    assert len(requests) <= transfer.STREAMS


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (
            lambda content, _: bytes(byte ^ 1 for byte in content[:100]) + content[100:],
            "do not have the hash that it gave",
        ),
        (lambda *_: None, r"cannot be reached: .*(ended in the middle|without response|IncompleteRead|reset|idle)"),
        (slow(1.0), "cannot be reached: timed out"),
    ],
)
def test_a_bad_source_is_named_and_replaced(sources, fetcher, spoilt, how, reason):
    bad = spoilt(sources[0], how)
    fetched = fetch([bad, sources[1].address], TOKEN, EXPECTED, 10.0)
    assert_is(fetched, STATE)
    with pytest.raises(transfer.TransferFailed, match=reason) as failed:
        fetcher.fetch([bad], 10.0)
    assert "\n" not in str(failed.value)
    assert_is(fetcher.fetch([sources[1].address], 10.0), STATE)


def test_chunks_fetched_before_a_failure_are_kept(sources, fetcher, spoilt, after_chunks):
    arrived = threading.Event()
    after_chunks(lambda received: arrived.set() if received >= 3 * CHUNK_BYTES else None)

    def four_chunks(content: bytes, number: int) -> bytes | None:
        return content if number < 5 else arrived.wait(10.0) and None

    with pytest.raises(transfer.TransferFailed):
        fetcher.fetch([spoilt(sources[0], four_chunks)], 10.0)
    fetched = fetcher.fetch([sources[1].address], 10.0)
    assert_is(fetched, STATE)
    assert fetched.received_bytes <= STATE["large|0"].array.nbytes - 2 * CHUNK_BYTES


def test_a_slow_source_does_not_hold_up_the_end(sources, spoilt):
    address = spoilt(sources[0], slow(0.3))
    begin = time.monotonic()
    assert_is(fetch([address, sources[1].address], TOKEN, EXPECTED, 30.0), STATE)
    # It would have half of eleven chunks, on two connections.
    assert time.monotonic() - begin < 1.5


def test_a_source_that_dies_in_the_middle(sources, after_chunks):
    after_chunks(lambda received: sources[0].close() if received > TOTAL // 3 else None)
    assert_is(fetch([server.address for server in sources], TOKEN, EXPECTED, 10.0), STATE)


def test_no_sources_and_no_state_and_no_time(make_server, sources, spoilt):
    with pytest.raises(transfer.TransferFailed, match=r"there is no source"):
        fetch([], TOKEN, EXPECTED, 1.0)
    with pytest.raises(transfer.TransferFailed, match=r"refuses: there is no state here yet"):
        fetch([make_server().address], TOKEN, EXPECTED, 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(transfer.TransferFailed, match=rf"{address} cannot be reached: timed out"):
            fetch([address], TOKEN, EXPECTED, 5.0)
    with pytest.raises(transfer.TransferFailed, match=r"not done after 0.5 s"):
        fetch([spoilt(sources[0], slow(0.3))], TOKEN, EXPECTED, 0.5)


def test_a_fetch_waits_for_the_end_of_a_round(make_server, fetcher):
    """An island that joins between two rounds takes part in the next one, however long the fetch took."""
    server = make_server()
    server.outer.publish(transfer.Snapshot(1, 4, STATE))
    server.outer.expect(60.0)
    before = fetcher.fetch([server.address], 10.0)
    assert (before.offer.round, before.settled) == (4, False)
    opened = [peer._connection.sock for peers in fetcher._links.values() for peer in peers]
    found = []
    joins = threading.Thread(
        target=lambda: found.append(fetcher.fetch([server.address], 10.0, manifest="/manifest/settled"))
    )
    joins.start()
    after = STATE | {"half|0": leaves(seed=1)["half|0"]}
    server.outer.publish(transfer.Snapshot(1, 5, after))
    joins.join()
    assert (found[0].offer.round, found[0].settled) == (5, True)
    assert_is(found[0], after)
    assert found[0].received_bytes == STATE["half|0"].array.nbytes, "what has not changed is here"
    assert opened == [peer._connection.sock for peers in fetcher._links.values() for peer in peers], "they stay open"


def test_only_missing_chunks_are_fetched(sources):
    held = {name: leaf.array for name, leaf in STATE.items()}
    fetched = fetch([sources[0].address], TOKEN, EXPECTED, 10.0, held=held)
    assert fetched.received_bytes == 0
    assert all(fetched.arrays[name] is held[name] for name in held)
    changed = held["large|0"].copy()
    changed[-1] += 1
    before = changed.copy()
    fetched = fetch([sources[0].address], TOKEN, EXPECTED, 10.0, held={**held, "large|0": changed})
    assert_is(fetched, STATE)
    assert fetched.received_bytes == STATE["large|0"].array.nbytes % CHUNK_BYTES
    np.testing.assert_array_equal(changed, before)


def test_a_round_committed_during_a_fetch(sources, monkeypatch, after_chunks):
    monkeypatch.setattr(transfer, "LEASE_SECONDS", 0.0)
    server, after = sources[0], leaves(seed=1, version=5)
    after["matrix|0"] = STATE["matrix|0"]

    def commit(received: int) -> None:
        if received > TOTAL // 3 and server.outer._snapshot.round == 4:
            server.outer.publish(transfer.Snapshot(1, 5, after))

    after_chunks(commit)
    fetched = fetch([server.address], TOKEN, EXPECTED, 10.0)
    assert fetched.offer.round == 5
    assert_is(fetched, after)


def test_the_newest_state_wins_and_then_the_majority(sources):
    sources[0].outer.publish(transfer.Snapshot(1, 5, leaves(seed=1)))
    assert fetch([server.address for server in sources], TOKEN, EXPECTED, 10.0).offer.round == 5
    sources[1].outer.publish(transfer.Snapshot(1, 5, leaves(seed=2)))
    sources[2].outer.publish(transfer.Snapshot(1, 5, leaves(seed=2)))
    assert_is(fetch([server.address for server in sources], TOKEN, EXPECTED, 10.0), leaves(seed=2))


def test_a_manifest_of_a_terabyte_and_a_reply_that_never_ends_are_refused_before_anything_is_allocated(
    sources, make_server, monkeypatch
):
    offered = copy.deepcopy(sources[0].outer.manifest())
    assert len(canonical(offered)) < transfer.largest_manifest_bytes(EXPECTED) - 2**20, "a manifest fits"
    liar, endless = sources[1], make_server()
    offered["leaves"]["large|0"]["shape"] = [250_000_000_000]
    liar.outer.manifest = lambda wait_seconds: offered
    endless.outer.manifest = lambda wait_seconds: {"leaves": "[" * transfer.largest_manifest_bytes(EXPECTED)}
    terabyte = r"offers large\|0 as float32\[250000000000\].*; here it is float32"
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "Assembly", lambda *_: pytest.fail("something was allocated"))
        patch.setattr(transfer, "STALL_SECONDS", 20.0)  # a busy machine takes long to make such a reply
        for source, refused in (
            (liar, terabyte),
            (endless, r"offers \d+ bytes for /manifest; at most \d+ are expected"),
        ):
            with pytest.raises(transfer.TransferFailed, match=refused):
                fetch([source.address], TOKEN, EXPECTED, 10.0)
    assert_is(fetch([liar.address, sources[0].address], TOKEN, EXPECTED, 10.0), STATE)


def test_nobody_on_the_way_sees_the_state(sources):
    with Recorder(sources[0].host, sources[0].port) as recorder:
        assert_is(fetch([f"{recorder.address}/{sources[0].recipient}"], TOKEN, EXPECTED, 20.0), STATE)
        seen = b"".join(map(bytes, recorder.recorded))
    assert len(seen) > TOTAL
    assert STATE["large|0"].array[5:9].tobytes() not in seen
    assert b"large|0" not in seen


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m["leaves"].pop("count|0"), r"does not have: count\|0"),
        (lambda m: m["leaves"].update(more=m["leaves"]["count|0"]), r"offers an array that is not expected here: more"),
        (lambda m: m["leaves"]["half|0"].update(dtype="object"), r"half\|0 as object"),
        (lambda m: m["leaves"]["half|0"].update(shape=[7, 2]), r"half\|0 as bfloat16\[7, 2\]"),
        (lambda m: m["leaves"]["large|0"]["pieces"].pop(), r"large\|0 with hashes that do not belong together"),
        (lambda m: m["leaves"]["large|0"].update(hash="00"), r"large\|0 with hashes that do not belong together"),
        (lambda m: m.update(piece_bytes=1), r"another version of Gregale"),
        (lambda m: m.update(round=1.5), r"is no integer"),
        (lambda m: m.update(leaves=None), r"an invalid manifest"),
        (lambda m: m.pop("facts"), r"an invalid manifest"),
    ],
)
def test_manifests_that_are_not_as_expected(sources, change, reason):
    with closing(client.PeerClient(sources[0].address, TOKEN, 5.0)) as peer:
        offered = peer.request("GET", "/manifest")
    assert transfer.read_manifest("it", offered, EXPECTED).round == 4
    change(offered)
    with pytest.raises(RequestRejected, match=reason):
        transfer.read_manifest("it", offered, EXPECTED)
