"""Random schedules of faults for the protocol of islands: `python -m tests.islands.simulator [--schedules N]`.

Every schedule runs real members against the real coordinator's rules, with a modelled network, engine and trainers, and
checks the invariants after every event. One that breaks one is printed with its number; `--replay NUMBER` prints that
schedule step by step.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.islands.simulator.invariants import BrokenError
from tests.islands.simulator.schedules import Outcome, run

CHUNK = 100  # schedules


def outcome_of(number: int, trace: list[str] | None = None) -> Outcome | str:
    """Return the outcome of a schedule, or what broke in it."""
    try:
        return run(number, trace=trace)
    except BrokenError as error:
        return str(error)


def replay(number: int) -> int:
    """Print what happens in a schedule; return 1 where an invariant breaks."""
    trace: list[str] = []
    end = outcome_of(number, trace)
    print("\n".join([*trace, f"BROKEN: {end}" if isinstance(end, str) else str(end)]))
    return int(isinstance(end, str))


def run_all(first: int, schedules: int, processes: int) -> int:
    """Run many schedules and print their outcomes; return 1 where an invariant breaks."""
    numbers, outcomes = range(first, first + schedules), list[Outcome]()
    with ProcessPoolExecutor(processes) as pool:
        for number, outcome in zip(numbers, pool.map(outcome_of, numbers, chunksize=CHUNK), strict=True):
            if isinstance(outcome, str):
                print(f"schedule {number}: {outcome}")
            else:
                outcomes.append(outcome)
    print(
        f"{schedules:,} schedules and {sum(each.rounds for each in outcomes):,} rounds: "
        f"{schedules - len(outcomes)} broken; in {sum(each.forked for each in outcomes):,} a generation began without "
        "knowing of all others; the longest wait for a round after the last fault was "
        f"{max((each.longest_wait for each in outcomes), default=0.0):.0%} of what the timing allows"
    )
    return int(len(outcomes) < schedules)


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if nothing broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--replay", type=int, metavar="NUMBER")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        return replay(options.replay)
    return run_all(options.first, options.schedules, options.processes)


if __name__ == "__main__":
    sys.exit(main())
