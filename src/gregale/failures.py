"""The share of useful steps under failures of chips, by the way in which a run is divided and goes on.

Failures are independent, and exponentially distributed. A run that a failure stops computes again after a restart, and
another failure in the restart begins it anew. So work that comes in units of L seconds, each lost as a whole, with rate
lambda of failures, restart R and overhead D a unit, has the useful share

    lambda L exp(-lambda R) / (exp(lambda (L + D)) - 1)

(Daly, A higher order estimate of the optimum checkpoint interval, 2006: work between two checkpoints, D to save one).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

INTERVALS = np.logspace(0, 6, 601)  # seconds between checkpoints, of which the best counts
DRAWN = 200_000  # rounds of islands, of a fleet that waits for its slowest
LONGEST = 5.0  # failures in a round of an island and in its restart, above which a fleet in lock step stands still


@dataclass(frozen=True)
class Failures:
    """The failures of chips, and what they cost, in seconds."""

    chip_mtbf: float  # mean time between failures of a chip
    slice_chips: int  # that leave with a chip which fails
    restart: float  # from a failure until what it stopped computes again on other chips
    reconfigure: float  # all wait while an elastic run goes on without a slice, or with one more
    repair: float  # until an elastic run has a slice back
    save: float  # to save a checkpoint


@dataclass(frozen=True)
class Division:
    """A run on `chips`, in `islands` equal parts that exchange their parameters once in `round` seconds."""

    chips: float
    islands: int
    round: float
    heal: float  # seconds in which an island gets the outer parameters of its peers


def useful_share(rate: float, restart: float, length: float, save: float = 0.0) -> float:
    """Return the share of time in units of work that no failure ends, see the module."""
    exponent = rate * (length + save)
    return float(rate * length * np.exp(-rate * restart) / np.expm1(exponent)) if exponent < 700 else 0.0


def data_parallel(failures: Failures, run: Division) -> float:
    """All chips go back to the newest checkpoint, at the best interval, on spare chips."""
    rate = run.chips / failures.chip_mtbf
    return max(useful_share(rate, failures.restart, each, failures.save) for each in INTERVALS)


def elastic(failures: Failures, run: Division) -> float:
    """Slices with a failure leave, and come back repaired; all wait at both. Of time without a wait no step is lost.

    A slice is in operation for a share a = 1 / (1 + repair / mtbf of a slice). With lambda a failures a second, and as
    many returns, each of which begins a wait anew, nothing waits for a share exp(-2 lambda a reconfigure).
    """
    of_slice = failures.slice_chips / failures.chip_mtbf
    present = 1 / (1 + of_slice * failures.repair)
    return float(present * np.exp(-2 * run.chips / failures.chip_mtbf * present * failures.reconfigure))


def lock_step(failures: Failures, run: Division) -> float:
    """Islands wait for all others at the end of a round; one that fails makes its steps of the round again.

    A round of L seconds in which no island fails takes L. The mean of the others is that of `DRAWN` islands' rounds.
    Shares below a hundredth count as 0.
    """
    rate, down = run.chips / run.islands / failures.chip_mtbf, failures.restart + run.heal
    if rate * (run.round + down) > LONGEST:
        return 0.0
    random, rounds = np.random.default_rng(0), max(100, DRAWN // run.islands)
    fails, none = -np.expm1(-rate * run.round), np.exp(-rate * run.round * run.islands)
    # In a round with a failure: the first island that fails, and how many of those behind it fail too.
    first = np.ceil(-np.log1p(-random.uniform(size=rounds) * (1 - none)) / (rate * run.round)).clip(1, run.islands)
    count = 1 + random.binomial((run.islands - first).astype(int), fails)
    of_round = np.repeat(np.arange(rounds), count)
    seconds = -np.log1p(-random.uniform(size=len(of_round)) * fails) / rate  # until the first failure
    pending = np.arange(len(of_round))
    while len(pending):
        waiting = pending
        while len(waiting):
            until = random.exponential(1 / rate, len(waiting))
            seconds[waiting] += np.minimum(until, down)
            waiting = waiting[until < down]
        until = random.exponential(1 / rate, len(pending))
        seconds[pending] += np.minimum(until, run.round)
        pending = pending[until < run.round]
    slowest = np.full(rounds, run.round)
    np.maximum.at(slowest, of_round, seconds)
    return float(run.round / (none * run.round + (1 - none) * slowest.mean()))


def islands(failures: Failures, run: Division) -> float:
    """Islands go on without one that fails. It comes back without its steps of a round.

    The others give it the outer parameters at the end of their round, half a round later on average. It is not counted
    that they wait there for one that failed shortly before.
    """
    rate, until_round = run.chips / run.islands / failures.chip_mtbf, run.round / 2 if run.islands > 1 else 0.0
    return useful_share(rate, failures.restart + until_round + run.heal, run.round)


def elastic_islands(failures: Failures, run: Division) -> float:
    """Islands that are elastic themselves: a failure is a wait of one island."""
    return elastic(failures, Division(run.chips / run.islands, 1, run.round, run.heal))


ALONE: dict[str, Callable[[Failures, Division], float]] = {"data-parallel": data_parallel, "elastic": elastic}
DIVIDED: dict[str, Callable[[Failures, Division], float]] = {
    "DiLoCo in lock step": lock_step,
    "islands": islands,
    "elastic islands": elastic_islands,
}


def useful_shares(failures: Failures, chips: list[int], counts: list[int], round: float, heal: float) -> dict:
    """Return the useful share by method, with its number of islands, and number of chips."""
    found = {name: [share(failures, Division(each, 1, round, heal)) for each in chips] for name, share in ALONE.items()}
    for count in counts:
        for name, share in DIVIDED.items():
            own = [share(failures, Division(each, count, round, heal)) for each in chips]
            found[f"{name} ({count})"] = own
    return found
