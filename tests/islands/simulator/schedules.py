"""Random schedules: some islands, some seconds of faults, then none, and progress within a bound."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from gregale.islands.protocol import messages as m
from gregale.islands.protocol.decision import SPLIT_AFTER
from gregale.islands.protocol.member import HEAL_MARGIN, MOST_LINGERS
from gregale.islands.protocol.messages import NO_ROUND, Timing
from tests.islands.simulator.coordinator import POLL_SECONDS, Coordinator
from tests.islands.simulator.invariants import BrokenError
from tests.islands.simulator.node import Node
from tests.islands.simulator.world import TIMING, Weather, World, some_timing

FAULT_SECONDS = 10.0
CALM = 4.0  # limits of a wait after the last fault: some more rounds by then, and all that live have the same state
CALM_ROUNDS = 4


@dataclass(frozen=True)
class Outcome:
    rounds: int
    forked: bool
    longest_wait: float  # for a round, after the last fault, as a share of `longest_wait`


def run(number: int, trace: list[str] | None = None, coordinators: int = 1) -> Outcome:
    """Runs schedule `number`.

    Raises:
        BrokenError: an invariant does not hold; `trace`, a list, has what happened.
    """
    world = World(number, trace=trace, coordinators=coordinators)
    rng = world.rng
    names = [f"i{index}" for index in range(rng.choice((1, 2, 2, 3, 3, 4, 5)))]
    for name in names:
        world.later(rng.choice((0.0, rng.random() * 5)), lambda name=name: world.start(name))
    if coordinators > 1 and number % 2:
        most = len(names) // 2 + 1
        world.rules = replace(world.rules, minimum=most, start=most)
    for _ in range(rng.choice((0, 1, 2, 3, 5, 8))):
        world.later(rng.uniform(0.5, FAULT_SECONDS), lambda: _fault(world, rng, names))
    world.run_until(FAULT_SECONDS)
    _calm(world, names)
    return _demand_progress(world)


def is_found(numbers: range, coordinators: int = 1) -> bool:
    """Return whether a planted mistake breaks an invariant in one of these schedules."""
    try:
        for number in numbers:
            run(number, coordinators=coordinators)
    except BrokenError:
        return True
    return False


def begin(number: int, islands: int, timing: Timing | None, delay: float) -> tuple[float, float]:
    """Runs the beginning of a fleet that needs all its islands; others have died, and the coordinator knows only later.

    Returns the seconds from the arrival of the last island to the state of the fleet in all, and their limit, which
    `docs/protocol.md` has: a heartbeat timeout, the coordinator's wait and two round trips.
    """
    world = World(number)
    rng, timing = world.rng, timing or some_timing(world.rng)
    world.timing, world.rules = timing, replace(world.rules, minimum=1, start=islands)
    world.weather = Weather(0.0, 0.0, 0.0, 0.0, 0.0, delay)
    last = rng.uniform(0.0, 30.0)
    for name in range(islands):
        world.later(last if name == 0 else rng.uniform(0.0, last), lambda name=name: world.start(f"i{name}"))
    heartbeat_seconds, first = timing.heartbeat_seconds, world.coordinators[0]
    dead = [(f"dead{name}", "s", heartbeat_seconds, False) for name in range(2 * islands)]
    world.later(last, lambda: [first.membership.beat(*each, first.clock) for each in dead])
    limit = heartbeat_seconds + timing.gather_seconds + 4 * delay + POLL_SECONDS
    while world.now < last + limit and not _has_begun(world, islands):
        world.run_until(world.now + 0.01)
    return world.now - last if _has_begun(world, islands) else math.inf, limit


def fail_over(number: int, timing: Timing, with_island: bool) -> tuple[float, float]:
    """Kill the first of two coordinators of three islands, and an island at once; start it again later.

    Returns the seconds from one round to the next around its death, and those until all have found it again.
    """
    world = World(7 * number, coordinators=2)  # its run has no end
    rng = world.rng
    world.timing, world.rules = timing, replace(world.rules, minimum=2, start=3, stages=())
    world.weather = Weather(0.0, 0.0, 0.0, 0.0, 0.0)
    world.speeds, first = (0.3,), world.coordinators[0]
    for index in range(3):
        world.start(f"i{index}")
    world.run_until(30 * timing.heartbeat_seconds + rng.uniform(0, 3))
    before = world.committed_at
    first.stop()
    if with_island:
        world.kill("i0")
    world.run_until(world.now + 0.01)
    died = world.now
    while world.committed_at < died + timing.network_seconds and world.now < died + 120:  # answers may be on their way
        world.run_until(world.now + 0.1)
    seconds = world.committed_at - before
    first.start()
    began = world.now
    while any(node.alive and node.choice.current for node in world.nodes.values()) and world.now < began + 120:
        world.run_until(world.now + 0.1)
    return seconds, world.now - began


def end_apart(number: int) -> World:
    """Have an island complete the run cut off from two of three coordinators, and two others again from checkpoints.

    Then both sides know only of their own last state. The two coordinators start again, all links are mended, and one
    of the two islands starts again. Return the world after that.
    """
    world = World(7 * number + 3, coordinators=3)
    world.timing, world.weather = TIMING, Weather(0.0, 0.0, 0.0, 0.0, 0.0)
    world.rules = replace(world.rules, minimum=2, start=2, stages=())
    for index in range(3):
        world.start(f"i{index}")
    first, *others = world.nodes.values()
    _run_until(world, lambda: all(node.trainer.saved()[0].round > NO_ROUND for node in others))
    for node in others:
        world.save(node)
    _run_until(world, lambda: first.member.is_complete)
    _, *coordinators = world.coordinators
    sides = (("i0", world.coordinators[0].name), ("i1", "i2", *(each.name for each in coordinators)))
    world.cuts = {way for one in sides[0] for other in sides[1] for way in both(one, other)}
    for node in others:
        world.kill(node.name)
        world.start(node.name)
    _run_until(world, lambda: not any(world.nodes[name].alive for name in ("i1", "i2")))
    for each in coordinators:
        each.stop()
        each.start()
    world.cuts.clear()
    world.run_until(world.now + 2 * world.timing.linger_seconds)
    world.start("i1")
    _run_until(world, lambda: not any(node.alive for node in world.nodes.values()))
    return world


def _run_until(world: World, true: Callable[[], bool]) -> None:
    end = world.now + 300.0
    while not true():
        if world.now > end:
            raise BrokenError("what is waited for does not happen")
        world.run_until(world.now + 0.02)


def _has_begun(world: World, islands: int) -> bool:
    return sum(state.round > NO_ROUND for state in world.states.values()) >= islands


def _fault(world: World, rng: random.Random, names: list[str]) -> None:
    living = [name for name, node in world.nodes.items() if node.alive and not node.paused]
    kind = rng.choice(FAULTS + SPLITS * (len(world.coordinators) > 1))
    if living or kind in (_coordinator, _freeze, _jump, _restart_all):
        kind(world, rng, rng.choice(living) if living else "", names)


def _kill(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    world.kill(name)
    if rng.random() < 0.6:
        world.later(rng.uniform(0.1, 5), lambda: _restart(world, name))


def _restart(world: World, name: str) -> None:
    if not world.nodes[name].alive:
        world.start(name, fresh=world.rng.random() < 0.3)


def _restart_all(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    """The whole fleet dies; its islands come back, some of them late or with an empty disk."""
    for other in world.nodes:
        world.kill(other)
        world.later(rng.choice((0.5, rng.uniform(0.1, 8))), lambda other=other: _restart(world, other))


def _pause(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    world.pause(name)
    world.later(rng.choice((0.1, 1.0, 3.0)) * rng.uniform(0.5, 6), lambda: world.resume(name))


def _jump(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    """A clock jumps: that of an island, or that of the coordinator."""
    seconds = rng.uniform(0.1, 5)
    world.log(f"the clock of {name} or of the coordinator jumps by {seconds:.1f} s")
    if name and rng.random() < 0.7:
        world.nodes[name].behind -= seconds
    else:
        _some_coordinator(world).behind -= seconds
        for node in world.nodes.values():
            node.reachable_since = world.now  # the coordinator takes all for silent


def _freeze(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    coordinator = _some_coordinator(world)
    coordinator.freeze()
    world.later(rng.uniform(0.1, 10), coordinator.thaw)


def _coordinator(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    coordinator = _some_coordinator(world)
    coordinator.stop()
    world.later(rng.uniform(0.01, 4), coordinator.start)


def _some_coordinator(world: World) -> Coordinator:
    return world.rng.choice(world.coordinators) if len(world.coordinators) > 1 else world.coordinators[0]


def _machine(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    """An island and a coordinator die at once; perhaps for a long time."""
    coordinator = _some_coordinator(world)
    world.kill(name)
    coordinator.stop()
    world.later(rng.choice((1, 10)) * rng.uniform(0.1, 4), coordinator.start)
    world.later(rng.choice((1, 10)) * rng.uniform(0.1, 4), lambda: _restart(world, name))


def _split(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    """Two sides with coordinators do not reach one another, or only in one direction; some are at both sides."""
    places = [*names, *(each.name for each in world.coordinators)]
    sides = {place: rng.choice(("a", "b", "ab" if rng.random() < 0.3 else "a")) for place in places}
    apart = [(one, other) for one in places for other in places if not set(sides[one]) & set(sides[other])]
    _cut_ways(world, rng, {way for way in apart if rng.random() < rng.choice((0.8, 1.0))})


def _cut_ways(world: World, rng: random.Random, cuts: set[tuple[str, str]]) -> None:
    world.log(f"links cut: {sorted(cuts)}")
    world.cuts |= cuts
    world.later(rng.choice((1.0, 3.0)) * rng.uniform(0.1, 6), lambda: _mend(world, cuts))


def _cut(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    """Links of an island are cut, some of them in one direction."""
    others = [*(each.name for each in world.coordinators), *(other for other in names if other != name)]
    cut = [other for other in others if rng.random() < rng.choice((0.3, 1.0))]
    cuts = {way for other in cut for way in rng.choice((((name, other),), ((other, name),), *4 * [both(name, other)]))}
    _cut_ways(world, rng, cuts)


def both(one: str, other: str) -> tuple[tuple[str, str], ...]:
    return (one, other), (other, one)


def _mend(world: World, cuts: set[tuple[str, str]]) -> None:
    world.log(f"links mended: {sorted(cuts)}")
    world.cuts -= cuts
    for node in world.nodes.values():
        if any((node.name, each.name) in cuts for each in world.coordinators):
            node.reachable_since = world.now


def _join(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    names.append(f"i{len(names)}")
    world.start(names[-1])


def _leave(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    world.log(f"{name} shall leave")
    world.nodes[name].tell(m.Leave())


def _doom(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    """It dies at a point of its round, or of its healing; often its new process does, too."""
    doom = rng.choice(("RequestMessage", "RequestView", "Reduce", "Commit", "Discard", "Heal", "Install", "Publish"))
    world.log(f"{name} shall die at {doom}")
    world.nodes[name].doom = doom
    if rng.random() < 0.5:
        world.later(rng.uniform(0.5, 5), lambda: _restart(world, name))


def _lose_data_path(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    """It, or one that heals just now, reaches the coordinator and no other island; perhaps for ever."""
    name = next((node.name for node in world.nodes.values() if node.hears and node.member.header.healing), name)
    world.log(f"{name} reaches no other island any more")
    world.bad.add(name)
    if rng.random() < 0.5:
        world.later(rng.uniform(1, 10), lambda: world.bad.discard(name))


def _diverge(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    world.log(f"{name} diverges")
    world.nodes[name].has_diverged = True
    world.nodes[name].trainer.factor = rng.choice((None, 1e6))


FAULTS: list[Callable[[World, random.Random, str, list[str]], None]] = [
    _kill, _kill, _doom, _doom, _pause, _pause, _coordinator, _cut, _cut, _lose_data_path, _diverge, _join, _leave,
    _restart_all, _jump, _freeze,
]  # fmt: skip
SPLITS = [_split, _split, _split, _machine, _machine, _coordinator]


def _calm(world: World, names: list[str]) -> None:
    """All faults end; there are at least two islands."""
    world.log("all faults end")
    world.weather = Weather(0.0, 0.0, 0.0, 0.0, 0.0)
    for each in world.coordinators:
        each.start()
        each.thaw()
    _mend(world, set(world.cuts))
    for name in list(world.nodes):
        world.resume(name)
    for node in world.nodes.values():
        node.doom, node.reachable_since = None, world.now
    _forget_lost_state(world)
    if world.rules.majority:  # a fleet that has lost too many of its members waits for them
        world.bad.clear()
        for name, node in list(world.nodes.items()):
            if not node.alive or node.member.leaving:
                node.alive = False
                world.start(name)
    # Who made the last round has to be asked: nobody may go on without one of them while they are there.
    voters = [node.name for node in staying(world) if node.member.header.voter]
    if voters and world.bad.issuperset(voters) and world.rules.minimum > 1:
        world.bad -= set(voters)
    while sum(node.name not in world.bad for node in staying(world)) < max(world.rules.minimum, world.rules.start):
        names.append(f"i{len(names)}")
        world.start(names[-1])


def _forget_lost_state(world: World) -> None:
    """As the lines of waiting islands tell: if all disks with a recorded state are lost, its records are deleted."""
    have = {saved.outer.fingerprint() for saved, _ in world.disks.values()}
    have |= {world.states[node.identity].fingerprint() for node in world.nodes.values() if node.alive}
    if have.issuperset(state for each in world.coordinators for _, state in each.disk.values()):
        return
    world.log("the recorded state is lost: all end, the records are deleted, and all start again")
    for each in world.coordinators:
        each.forget()
    world.final.clear()  # the run is trained anew
    for name in [node.name for node in staying(world)]:
        world.kill(name)
        world.start(name)


def staying(world: World) -> list[Node]:
    """The islands that live and do not leave."""
    return [node for node in world.nodes.values() if node.alive and not node.member.leaving]


def longest_wait(world: World) -> float:
    """Seconds within which a round is committed once there are no more faults, while `minimum` islands can be reached.

    - `heartbeat + 2 ask`: the coordinator finds who is missing; a request whose answer is lost is given up;
    - `2 turnover`: for islands that are missing and may live, and for one that heals more slowly than rounds are made;
      for this one also HEAL_MARGIN times what its last heal took;
    - a failed reduce, and the asks around it, for each try until those that do not reach each other are apart: PARTING
      tries. Where nobody can tell who does not answer, as many tries as islands for each number that is left out;
    - the time in which all islands hand over a message that has something in it.
    """
    timing, count = world.timing, len(staying(world))
    tries = SPLIT_AFTER + 1 + (count * (count - 1) if world.is_silent and world.bad else 0)
    ask = timing.gather_seconds + timing.retry_seconds
    steps = max(world.speeds) * (
        1 + max(world.pace.interval(number) for number in range(world.pace.schedule.fragments))
    )
    steps += 2 * max(world.copy_seconds.values(), default=0.0)  # one may be on its way for a state that is gone
    waits = timing.heartbeat_seconds + 2 * timing.ask_seconds + 2 * timing.turnover_seconds
    waits += HEAL_MARGIN * world.heal_seconds
    return waits + tries * (timing.reduce_seconds + 2 * ask) + 2 * (steps + ask)


def _demand_progress(world: World) -> Outcome:
    start = max((state.round for state in world.states.values()), default=0)
    most, longest, began = longest_wait(world), 0.0, world.now
    while world.now < began + CALM * most:
        world.run_until(world.now + 1.0)
        if world.complete or any(node.alive and node.member.is_complete for node in world.nodes.values()):
            _demand_completion(world, most + MOST_LINGERS * world.timing.linger_seconds)
            return Outcome(world.invariants.rounds, world.invariants.forked, longest / most)
        longest = max(longest, world.now - max(began, world.committed_at))
        if longest > most:
            break
        states = [world.states[node.identity] for node in staying(world) if not world.bad]
        newest = max((state.round for state in world.states.values()), default=0)
        if all(state.round >= max(newest - 1, 0) for state in states) and newest >= start + CALM_ROUNDS:
            generations = {state.generation for state in states if state.round == newest}
            if len(generations) <= 1:
                return Outcome(world.invariants.rounds, world.invariants.forked, longest / most)
    raise BrokenError(
        f"{longest:.0f} s without a round after the last fault (at most {most:.0f}), {newest - start} rounds in all: "
        + ", ".join(f"{node.name} {world.states[node.identity].round}" for node in staying(world))
        + f"; without a data path: {sorted(world.bad)}"
    )


def _demand_completion(world: World, seconds: float) -> None:
    """All islands end with the last state: those that were silent when the others did get it from one of them."""
    fleet = world.fleets
    _run_until_left(world, fleet, seconds)
    if world.fleets == fleet and (behind := _behind(world)):
        names = world.complete or world.nodes
        name = min(names, key=lambda name: (world.nodes[name].alive, name in world.bad, name))
        world.bad.discard(name)
        world.log(f"{behind} are left behind: {name} starts again")
        world.start(name)
        _run_until_left(world, fleet, seconds)
    if world.fleets == fleet and (behind := _behind(world)):  # otherwise another fleet has begun
        raise BrokenError(f"the run is complete, and {behind} do not end with it")


def _behind(world: World) -> list[str]:
    """Islands of the fleet that can get its state, and have not ended."""
    return [node.name for node in staying(world) if node.name not in world.bad and node.in_fleet_since < math.inf]


def _run_until_left(world: World, fleet: int, seconds: float) -> None:
    end = world.now + seconds
    while world.fleets == fleet and _behind(world) and world.now < end:
        world.run_until(world.now + 1.0)
