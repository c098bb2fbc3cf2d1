"""Real islands of unequal speed on this machine: who keeps its speed, who contributes, who heals.

    python -m benchmarks.unequal_islands                           # steps of 0.2, 1 and 4 s, seven minutes
    python -m benchmarks.unequal_islands --steps 0.2 2 --seconds 60

The device sleeps in a step, so islands do not compete for the processor. Beside the fleet runs its yardstick: two
islands with the shortest of the steps. Exit code 1 if an island heals, or two commit different states of a round.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.faults import write_inputs
from gregale.distributed.agreement import read_token
from gregale.islands.transport.client import ask_status
from tests.fleet import Fleet, Island, Seconds

PLUGIN = Path(__file__).parents[1] / "tests" / "slow_steps.py"
NAMES = "abcdefgh"
SYNCS = {
    "streaming": "{type: streaming_diloco, period: 12, fragments: 2, delay: 1, alpha: 0.5}",
    "diloco": "{type: diloco, period: 12}",
}
HEADINGS = ("", "island", "steps", "seconds a step", "speed", "rounds", "contributions", "heals", "waited, s")
STATUS_SECONDS = 5.0


class Count(NamedTuple):
    """What an island has done until a moment."""

    at: float
    steps: int
    waiting: float  # seconds


def counts(fleet: Fleet) -> dict[str, Count]:
    token = read_token(fleet.token, "islands.token_file")

    def counted(island: Island) -> Count:
        status = ask_status(island.address, token, STATUS_SECONDS)
        steps = (fleet.folder / f"steps-{island.process.pid}").stat().st_size
        return Count(time.time(), steps, status["waiting_seconds"])

    return {name: counted(island) for name, island in fleet.islands.items()}


def started(folder: Path, sync: str, steps: Sequence[float], options: argparse.Namespace) -> Fleet:
    """Start a fleet in a folder of its own; `steps`: the seconds of a step, by island."""
    write_inputs(folder)
    shutil.copy(PLUGIN, folder)
    # A line of metrics.jsonl waits for the device, and the loop would never run a step ahead of it.
    arguments = ("--plugins", "slow_steps", "--sync", sync, "--checkpoint.every", "1000000", "--log_every", "1000")
    arguments += ("--islands.min_members_to_start", str(len(steps)), "--islands.network", options.network)
    fleet = Fleet(folder, "fleet.yaml", Seconds(options.heartbeat, options.reduce), arguments)
    for name, seconds in zip(NAMES, steps, strict=False):
        fleet.start(name, "--callbacks", f"[{{type: slow_steps, seconds: {seconds}}}]")
    return fleet


def rows(fleet: Fleet, before: dict[str, Count], usual: float) -> list[tuple[float, str]]:
    """Return the seconds of a step and the cells of each island; `usual`: those seconds of the yardstick, or 0."""
    found = []
    for name, now in counts(fleet).items():
        then = before[name]
        rounds = [each for each in fleet.observe() if each.island == name and each.ended > then.at]
        contributed, heals = sum(each.weight > 0 for each in rounds), sum(each.healed for each in rounds)
        seconds = (now.at - then.at) / max(1, now.steps - then.steps)
        speed = f"{usual / seconds:.0%}" if usual else ""
        cells = now.steps - then.steps, f"{seconds:.3f}", speed, len(rounds) - heals, contributed, heals
        found.append((seconds, " | ".join(map(str, (name, *cells, f"{now.waiting - then.waiting:.1f}")))))
    return found


def measured(folder: Path, name: str, options: argparse.Namespace) -> bool:
    """Print the rows of a method; return whether no island healed and some rounds could be compared."""
    fast, usual, is_good = min(options.steps), 0.0, True
    kinds = {"yardstick": [fast, fast], "fleet": sorted(options.steps)}
    with ExitStack() as stack:
        fleets = {
            kind: stack.enter_context(started(folder / kind, SYNCS[name], steps, options))
            for kind, steps in kinds.items()
        }
        for fleet in fleets.values():
            fleet.wait_for_members([*fleet.islands], options.patience)
        time.sleep(options.warm)
        before = {kind: counts(fleet) for kind, fleet in fleets.items()}
        time.sleep(options.seconds)
        for kind, fleet in fleets.items():
            found = rows(fleet, before[kind], usual)
            usual = usual or found[0][0]
            for _, cells in found:
                print(f"| {name}, {kind} | {cells} |", flush=True)
            is_good &= fleet.check() > 0 and not any(each.healed for each in fleet.observe())
            said = {island.name: island.said().splitlines() for island in fleet.islands.values()}
            for text in [f"{each}: {line}" for each, lines in said.items() for line in lines if "WARNING" in line]:
                print(text, flush=True)
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=float, nargs="+", default=(0.2, 1.0, 4.0), help="seconds of a step, by island")
    parser.add_argument("--seconds", type=float, default=80.0, help="measured, of each method")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds from the first round until then")
    parser.add_argument("--only", nargs="*", choices=list(SYNCS), default=list(SYNCS))
    parser.add_argument("--network", choices=("lan", "wan"), default="lan")
    parser.add_argument("--heartbeat", type=float, default=2.0)
    parser.add_argument("--reduce", type=float, default=5.0)
    parser.add_argument("--patience", type=float, default=180.0, help="seconds until all are in a round")
    parser.add_argument("--keep", type=Path, help="folder for logs and runs, which stays")
    options = parser.parse_args()
    folder = (options.keep or Path(tempfile.mkdtemp(prefix="unequal-"))).resolve()
    print(f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|", flush=True)
    try:
        good = [measured(folder / name, name, options) for name in options.only]
        return int(not all(good))
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
