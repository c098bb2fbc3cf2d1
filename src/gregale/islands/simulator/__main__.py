"""`python -m gregale.islands.simulator SEED`: one schedule of the simulator, step by step."""

import sys

from gregale.islands.simulator.invariants import BrokenError
from gregale.islands.simulator.schedules import run


def main(number: int) -> int:
    """Prints what happens in schedule `number`; 1 where an invariant breaks."""
    trace: list[str] = []
    try:
        end, code = str(run(number, trace=trace)), 0
    except BrokenError as error:
        end, code = f"BROKEN: {error}", 1
    print("\n".join([*trace, end]))
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
