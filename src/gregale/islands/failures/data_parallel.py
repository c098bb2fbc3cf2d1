"""What the same failures cost data-parallel training, in which all take every step together.

A checkpoint is saved after every `interval_seconds` of training, and costs `save_seconds` of all. When a member dies,
all stop, and go on from the newest checkpoint after `reform_seconds`; what was trained since is trained again.

- plain: the fleet waits until the dead member is back;
- elastic: it goes on without it. A member that is back is taken in at the next checkpoint, for another
  `reform_seconds` and without a step lost.

A step takes as long as the slowest member's. Links cost nothing here, and detecting a death is part of
`reform_seconds`, so this flatters data-parallel: the comparison is about failures and unequal speeds alone.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

from gregale.islands.failures.fleet import Fleet, Outage
from gregale.islands.failures.outcome import Outcome


@dataclass(frozen=True)
class Checkpoints:
    """Seconds: between two checkpoints, that saving one takes, and from a death to the first step after it."""

    interval_seconds: float
    save_seconds: float
    reform_seconds: float


def best_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Young's interval, sqrt(2 save_seconds mtbf_seconds), for the time between failures of the whole fleet."""
    return math.sqrt(2 * save_seconds * mtbf_seconds)


@dataclass
class _Clock:
    now: float = 0.0
    useful: float = 0.0  # seconds x islands
    steps: float = 0.0
    lost: float = 0.0


def data_parallel(
    fleet: Fleet, outages: tuple[Outage, ...], seconds: float, checkpoints: Checkpoints, elastic: bool
) -> Outcome:
    """Runs it for `seconds`."""
    clock, deaths = _Clock(), [outage.death for outage in outages]
    step_seconds = [site.step_seconds for site in fleet.sites]
    longest = max((outage.back - outage.death for outage in outages), default=0.0)
    ready = 0.0  # when training goes on
    while clock.now < seconds:
        away = _away(outages, deaths, longest, clock.now)
        if away and (not elastic or len(away) == len(step_seconds)):
            clock.now = min(away.values())
            ready = clock.now + checkpoints.reform_seconds
            continue
        absent = set(away)
        death = _next_death(outages, deaths, clock.now, absent)
        if death <= ready:
            clock.now, ready = death, death + checkpoints.reform_seconds
            continue
        back = min(away.values(), default=math.inf)
        clock.now = _train(clock, step_seconds, absent, ready, min(death, seconds), back, checkpoints, death < seconds)
        ready = clock.now + checkpoints.reform_seconds
    all_seconds = seconds * len(step_seconds)
    down = sum(min(outage.back, seconds) - outage.death for outage in outages)
    return Outcome(
        seconds=seconds,
        deaths=len(outages),
        goodput=clock.useful / all_seconds,
        tokens=clock.steps / (seconds * fleet.steps_per_second()),
        lost=clock.lost / all_seconds,
        down=down / all_seconds,
        joining=0.0,
        waiting=max(0.0, 1 - (clock.useful + clock.lost + down) / all_seconds),  # the rest: saving and slower ones too
    )


def _away(outages: tuple[Outage, ...], deaths: list[float], longest: float, now: float) -> dict[int, float]:
    """Who is dead now, and when each is back."""
    first, last = bisect_right(deaths, now - longest), bisect_right(deaths, now)
    return {each.island: each.back for each in outages[first:last] if now < each.back}


def _next_death(outages: tuple[Outage, ...], deaths: list[float], now: float, absent: set[int]) -> float:
    """Of a member; one that is not in the fleet yet may die again without stopping it."""
    later = (outages[at] for at in range(bisect_right(deaths, now), len(outages)))
    return next((each.death for each in later if each.island not in absent), math.inf)


def _train(
    clock: _Clock,
    step_seconds: list[float],
    absent: set[int],
    ready: float,
    stop: float,
    back: float,
    checkpoints: Checkpoints,
    dies: bool,
) -> float:
    """Trains from `ready` to `stop`, or to the first checkpoint after `back`; the time at which it ends."""
    present = [each for island, each in enumerate(step_seconds) if island not in absent]
    cycle = checkpoints.interval_seconds + checkpoints.save_seconds
    wanted = max(1, math.ceil((back - ready) / cycle)) if back < math.inf else math.inf
    cycles = min(wanted, max(0.0, (stop - ready)) // cycle)
    kept, end = cycles * checkpoints.interval_seconds, ready + cycles * cycle
    if cycles < wanted:  # cut off by a death, or by the end of the run
        rest = max(0.0, min(stop - end, checkpoints.interval_seconds))
        if dies:
            clock.lost += rest / max(present) * sum(present)
        else:
            kept += rest
        end = stop
    steps = kept / max(present)
    clock.useful += steps * sum(present)
    clock.steps += steps * len(present)
    return end
