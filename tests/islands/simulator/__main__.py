"""Random schedules of faults for the protocol of islands: `python -m tests.islands.simulator [--schedules N]`.

Every schedule runs real members against the real coordinator's rules, with a modelled network, engine and trainers, and
checks the invariants after every event. One that breaks one is printed with its number; `--replay NUMBER` prints that
schedule step by step.
"""

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.islands.simulator.invariants import BrokenError
from tests.islands.simulator.schedules import Outcome, run

AT_ONCE = 500


def replay(number: int) -> int:
    """Prints what happens in schedule `number`; 1 where an invariant breaks."""
    trace: list[str] = []
    end = outcome_of(number, trace)
    print("\n".join([*trace, f"BROKEN: {end}" if isinstance(end, str) else str(end)]))
    return int(isinstance(end, str))


def outcome_of(number: int, trace: list[str] | None = None) -> Outcome | str:
    """What a schedule came to, or what broke in it."""
    try:
        return run(number, trace=trace)
    except BrokenError as error:
        return str(error)


def outcomes_from(first: int, count: int) -> list[tuple[int, Outcome | str]]:
    """The outcomes of `count` schedules, by number."""
    return [(number, outcome_of(number)) for number in range(first, first + count)]


def run_all(first: int, schedules: int, processes: int) -> int:
    """Runs many schedules and prints what they came to; 1 where an invariant breaks."""
    totals: Counter[str] = Counter()
    longest = 0.0
    starts = range(first, first + schedules, AT_ONCE)
    counts = [min(AT_ONCE, first + schedules - start) for start in starts]
    with ProcessPoolExecutor(processes) as pool:
        for outcomes in pool.map(outcomes_from, starts, counts):
            for number, outcome in outcomes:
                totals["schedules"] += 1
                if isinstance(outcome, str):
                    totals["broken"] += 1
                    print(f"\nschedule {number}: {outcome}")
                else:
                    totals["rounds"] += outcome.rounds
                    totals["forked"] += outcome.forked
                    longest = max(longest, outcome.longest_wait)
            print(f"\r{totals['schedules']:,} schedules", end="", flush=True, file=sys.stderr)
    print(
        f"\n{totals['schedules']:,} schedules and {totals['rounds']:,} rounds: {totals['broken']} broken; in "
        f"{totals['forked']:,} a generation began without knowing of all others; the longest wait for a round after "
        f"the last fault was {longest:.0%} of what the timing allows"
    )
    return int(totals["broken"] > 0)


def main(arguments: list[str] | None = None) -> int:
    """0 where nothing broke."""
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
