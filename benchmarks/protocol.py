"""The islands' protocol under random schedules of faults: `python benchmarks/protocol.py [--schedules N] [--first N]`.

Every schedule runs real members against a modelled coordinator, network, engine and trainers, and checks the
invariants after every event (`gregale.islands.simulator`). One that breaks one is printed with its number;
`python -m gregale.islands.simulator NUMBER` replays it step by step.
"""

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from gregale.islands.simulator.invariants import BrokenError
from gregale.islands.simulator.schedules import Outcome, run

AT_ONCE = 500


def run_many(first: int, count: int) -> list[tuple[int, Outcome | str]]:
    """The outcomes of `count` schedules, or what broke in them."""
    return [(number, _outcome(number)) for number in range(first, first + count)]


def _outcome(number: int) -> Outcome | str:
    try:
        return run(number)
    except BrokenError as error:
        return str(error)


def main() -> int:
    """0 where nothing broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    totals: Counter[str] = Counter()
    longest, began = 0.0, time.monotonic()
    with ProcessPoolExecutor(options.processes) as pool:
        firsts = range(options.first, options.first + options.schedules, AT_ONCE)
        for outcomes in pool.map(partial(run_many, count=AT_ONCE), firsts):
            for number, outcome in outcomes:
                totals["schedules"] += 1
                if isinstance(outcome, str):
                    totals["broken"] += 1
                    print(f"\nschedule {number}: {outcome}")
                else:
                    totals["rounds"] += outcome.rounds
                    totals["forked"] += outcome.forked
                    longest = max(longest, outcome.longest_wait)
            print(
                f"\r{totals['schedules']:,} schedules, {totals['broken']} broken", end="", flush=True, file=sys.stderr
            )
    seconds = time.monotonic() - began
    print(
        f"\n{totals['schedules']:,} schedules and {totals['rounds']:,} rounds in {seconds:.0f} s "
        f"({totals['rounds'] / seconds:,.0f} rounds/s): {totals['broken']} broken; in {totals['forked']:,} a "
        f"generation began without knowing of all others; the longest wait for a round after the last fault was "
        f"{longest:.0%} of what the timing allows"
    )
    return int(totals["broken"] > 0)


if __name__ == "__main__":
    sys.exit(main())
