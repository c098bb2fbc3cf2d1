"""One host of an island: what it serves to those that heal, and what it takes of others, over real servers."""

from dataclasses import replace

import pytest

from gregale.islands.driver import newest
from gregale.islands.hosts import FetchedState, HostGroup, HostWorker
from gregale.islands.outer import HostOuter
from gregale.islands.protocol.messages import Generation, OuterRecord, Peer, Timing, seed
from gregale.islands.transport.server import Endpoint, Server
from gregale.islands.transport.transfer import TransferFailed
from gregale.methods.schedule import Schedule
from gregale.training.state import initial_state
from tests.methods.islands import LAYERS, Net, on_one_device

TOKEN = b"a token of the fleet"
TIMING = Timing(reduce_seconds=20.0, heal_seconds=20.0)
SCHEDULE = Schedule(4, 2, 1, LAYERS)


@pytest.fixture
def make():
    """Makes a host that holds the common seed."""
    made = []

    def one() -> HostWorker:
        outer = HostOuter(on_one_device(SCHEDULE))
        outer.begin(initial_state(outer.island, Net.init).method.psdp.parameters)
        server = Server(Endpoint("127.0.0.1"), TOKEN, dict)
        made.append(HostWorker(outer, SCHEDULE, server, TOKEN, TIMING))
        return made[-1]

    yield one
    for worker in made:
        worker.close()


def at_round(worker: HostWorker, number: int, change: float = 0.0) -> OuterRecord:
    """A host that serves the state of a round; returns its record. `change`: of one value, after it was recorded."""
    arrays = {name: held.array + number for name, held in worker.outer.leaves().items()}
    worker.outer.load(arrays, dict.fromkeys(arrays, number))
    record = replace(seed(worker.outer.digest), round=number, generation=Generation(1, "line"))
    next(iter(arrays.values())).reshape(-1)[0] += change
    worker.publish(record)
    return record


def peer(worker: HostWorker, name: str) -> Peer:
    return Peer(name, "session", (worker.server.address,))


def test_a_state_changed_after_its_commit_or_with_an_invalid_record_is_fetched_from_another_source(make):
    """Its pieces have the right hashes, as a source makes them of what it has; and here it has the majority."""
    joiner, sound, spoilt, other, odd = (make() for _ in range(5))
    record = at_round(sound, 3)
    assert at_round(spoilt, 3, change=1.0) == at_round(other, 3, change=1.0) == record
    at_round(odd, 4)
    odd.server.outer.publish(replace(odd.server.outer._snapshot, facts={"outer": "garbage"}))
    sources = [peer(spoilt, "spoilt"), peer(odd, "odd"), peer(other, "other"), peer(sound, "sound")]
    before = joiner.outer.digest
    hosts = HostGroup(joiner)
    with pytest.raises(TransferFailed, match=r"round 3 of spoilt have the digest .*, their record has"):
        hosts.heal(sources[:1], settled=False)
    assert hosts.heal(sources, settled=False).outer == record
    assert joiner.outer.digest == before, "nothing is taken over before `install`"
    hosts.install(record)
    assert joiner.outer.digest == record.digest == sound.outer.digest


@pytest.mark.parametrize(
    ("found", "seconds", "round"),
    [
        ([(3, True), (3, True)], 60.0, 3),
        ([(3, False), (4, True)], 60.0, 4),
        ([(3, True), (4, False), (5, False), (5, True)], 60.0, 5),
        ([(3, False), (3, False)], 0.0, 3),  # a round that does not end is not waited for for ever
    ],
)
def test_a_joiner_fetches_a_state_that_no_round_is_about_to_replace(found, seconds, round):
    asked, comes = [], iter(found)

    def heal(settled: bool) -> FetchedState:
        asked.append(settled)
        number, is_settled = next(comes)
        return FetchedState(replace(seed("d"), round=number), "d", is_settled)

    assert newest(heal, False, seconds).round == round
    assert asked == [False, *(len(found) - 1) * [True]]
