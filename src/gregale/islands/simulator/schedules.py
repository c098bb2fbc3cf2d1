"""Random schedules: some islands, some seconds of faults, then none, and progress within a bound."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from gregale.islands.protocol import messages as m
from gregale.islands.protocol.member import Member
from gregale.islands.simulator.invariants import BrokenError
from gregale.islands.simulator.world import COORDINATOR, Weather, World

FAULT_SECONDS = 10.0
CALM_SECONDS = 40.0  # after the last fault: two more rounds by then, and all that live have the same state
CALM_ROUNDS = 2


@dataclass(frozen=True)
class Outcome:
    """What a schedule came to."""

    rounds: int
    generations: int
    forked: bool
    seconds: float
    recovery_seconds: float


def run(number: int, member_class: type[Member] = Member, trace: list[str] | None = None) -> Outcome:
    """Runs schedule `number`.

    Raises:
        BrokenError: an invariant does not hold; `trace`, a list, has what happened.
    """
    world = World(number, member_class, trace)
    rng = world.rng
    names = [f"i{index}" for index in range(rng.choice((1, 2, 2, 3, 3, 4, 5)))]
    for name in names:
        world.later(rng.choice((0.0, rng.random() * 5)), lambda name=name: world.start(name))
    for _ in range(rng.choice((0, 1, 2, 3, 5, 8))):
        world.later(rng.uniform(0.5, FAULT_SECONDS), lambda: _fault(world, rng, names))
    world.run_until(FAULT_SECONDS)
    _calm(world, names)
    return _demand_progress(world)


def _fault(world: World, rng: random.Random, names: list[str]) -> None:
    living = [name for name, node in world.nodes.items() if node.alive and not node.paused]
    kind = rng.choice(FAULTS)
    if living or kind is _coordinator:
        kind(world, rng, rng.choice(living) if living else "", names)


def _kill(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    world.kill(name)
    if rng.random() < 0.6:
        world.later(rng.uniform(0.1, 5), lambda: _restart(world, name))


def _restart(world: World, name: str) -> None:
    if not world.nodes[name].alive:
        world.start(name)


def _pause(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    world.pause(name)
    world.later(rng.uniform(0.1, 6), lambda: world.resume(name))


def _coordinator(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    world.stop_coordinator()
    world.later(rng.uniform(0.01, 4), world.start_coordinator)


def _cut(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    others = [COORDINATOR, *(other for other in names if other != name)]
    cuts = {frozenset((name, other)) for other in others if rng.random() < rng.choice((0.3, 1.0))}
    world.log(f"links cut: {sorted(sorted(cut) for cut in cuts)}")
    world.cuts |= cuts
    if frozenset((name, COORDINATOR)) in cuts:
        world.nodes[name].cut_off_at = world.now
    world.later(rng.uniform(0.1, 6), lambda: _mend(world, cuts))


def _mend(world: World, cuts: set[frozenset[str]]) -> None:
    world.log(f"links mended: {sorted(sorted(cut) for cut in cuts)}")
    world.cuts -= cuts
    for node in world.nodes.values():
        if node.alive and not node.paused and world.connected(node.name, COORDINATOR):
            node.cut_off_at = None


def _join(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    names.append(f"i{len(names)}")
    world.start(names[-1])


def _leave(world: World, rng: random.Random, name: str, names: list[str]) -> None:
    world.log(f"{name} shall leave")
    world.nodes[name].tell(m.Leave())


FAULTS: list[Callable[[World, random.Random, str, list[str]], None]] = [
    _kill, _kill, _pause, _pause, _coordinator, _cut, _cut, _join, _leave
]  # fmt: skip


def _calm(world: World, names: list[str]) -> None:
    """All faults end; there are at least two islands."""
    world.log("all faults end")
    world.weather = Weather(0.0, 0.0, 0.0, 0.0, 0.0)
    world.start_coordinator()
    _mend(world, set(world.cuts))
    for name in list(world.nodes):
        world.resume(name)
    while sum(node.alive and not node.member.leaving for node in world.nodes.values()) < max(world.rules.minimum, 1):
        names.append(f"i{len(names)}")
        world.start(names[-1])


def _demand_progress(world: World) -> Outcome:
    start = max((state.round for state in world.states.values()), default=0)
    began, last = world.now, world.now + CALM_SECONDS
    while world.now < last:
        world.run_until(world.now + 1.0)
        states = [
            world.states[node.identity] for node in world.nodes.values() if node.alive and not node.member.leaving
        ]
        newest = max((state.round for state in states), default=0)
        if all(state.round >= max(newest - 1, 0) for state in states) and newest >= start + CALM_ROUNDS:
            generations = {state.generation for state in states if state.round == newest}
            if len(generations) == 1:
                recovery = world.now - began
                done = world.invariants
                return Outcome(done.rounds, len(done.lines), done.forked, world.now, recovery)
        if not states:
            return Outcome(world.invariants.rounds, len(world.invariants.lines), False, world.now, 0.0)
    raise BrokenError(
        f"no {CALM_ROUNDS} rounds by all in {CALM_SECONDS:g} s without faults: "
        + ", ".join(f"{node.name} {world.states[node.identity].round}" for node in world.nodes.values() if node.alive)
    )
