"""What a fleet does when something breaks: real islands on this machine, disturbed as in docs/islands.md, "Faults".

    python -m benchmarks.faults                          # each fault once: a table, exit code 1 if a check fails
    python -m benchmarks.faults --only reduce stop       # some of them
    python -m benchmarks.faults --soak 20                # a random fault every 20 s, one poisoning a minute
    python -m benchmarks.faults --soak 20 --every 9 16 --faults now link --bandwidth 50mbit --round_trip_ms 100  # root

Four islands with a small model; a step takes at least `--pace` seconds, as if the device were not the processor that
all of them share. As root they are in network namespaces, so that a link can be cut. What a busy machine needs beyond
the allowance goes into `--allowance`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.fault_kinds import FAULTS, Fault, Run
from benchmarks.fault_soak import SOAK_FAULTS, soak
from tests.fleet import Fleet, Late, Seconds
from tests.namespaces import rate_limited

NAMES = ("a", "b", "c", "d")
WORDS = ["a", "the", "wind", "sea", "north", "east", "gale", "island", "replica", "shard", "step", "loss", "mesh"]
CONFIG = """
steps: 1000000
cpu_devices: 1
mesh: {data: 1}
model: {type: llama, layers: 2, hidden: 64, heads: 2, kv_heads: 2, mlp: 128}
compute: {dtype: float32, remat: none}
data: {sources: {words: {type: text, files: ["text/*.txt"]}}, held_out: 0.2, workers: 1}
batch: {size: 4, sequence_length: 32}
optimizer: {type: adamw, learning_rate: 0.003, schedule: {type: constant, warmup: 10}}
checkpoint: {every: 60}
sync: {type: streaming_diloco, period: 20, fragments: 2, delay: 2, alpha: 0.5}
"""


class Row(NamedTuple):
    """A line of the table; `wrong`: what a check has found."""

    fault: str
    again: float | None
    back: float | None
    rounds: int
    load: float
    wrong: str


def write_inputs(folder: Path) -> None:
    """The text and the configuration."""
    source = random.Random(0)
    (folder / "text").mkdir(parents=True)
    for number in range(64):
        (folder / "text" / f"{number}.txt").write_text(" ".join(source.choices(WORDS, k=400)))
    (folder / "fleet.yaml").write_text(CONFIG)


def measured(fault: Fault, run: Run, allowance: float) -> Row:
    """One fault and what followed from it."""
    again = back = None
    wrong, rounds = "", 0
    try:
        run.ready()
        again, back = fault.happens(run)
        rounds = run.fleet.check()
        if again is not None and again > run.fleet.seconds.heartbeat + allowance:
            wrong = f"the survivors took longer than {run.fleet.seconds.heartbeat + allowance:g} s"
    except (Late, AssertionError) as error:
        wrong = str(error)
    return Row(fault.name, again, back, rounds, os.getloadavg()[0], wrong)


def table(rows: list[Row]) -> str:
    """As Markdown."""

    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.1f} s"

    lines = [
        "| fault | survivors commit again after | takes part again after | rounds compared | load | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = row.wrong.splitlines()[0] if row.wrong else "good"
        lines.append(
            f"| {row.fault} | {seconds(row.again)} | {seconds(row.back)} | {row.rounds} | {row.load:.0f} | {found} |"
        )
    return "\n".join(lines)


def faults(options: argparse.Namespace, folder: Path) -> int:
    """Each fault once."""
    chosen = [fault for fault in FAULTS if not options.only or fault.key in options.only]
    rows: list[Row] = []
    with ExitStack() as stack:
        network = stack.enter_context(rate_limited(len(NAMES), None)) if os.geteuid() == 0 else None
        seconds = Seconds(options.heartbeat, options.reduce)
        fleet = stack.enter_context(
            Fleet(folder, "fleet.yaml", seconds, ("--islands.min_members_to_start", "4"), True, network, options.pace)
        )
        run = Run(fleet, NAMES, options.patience)
        for name in NAMES:
            fleet.start(name)
        for fault in chosen:
            if fault.key == "link" and network is None:
                print("The link is cut only as root, in network namespaces.")
                continue
            rows.append(measured(fault, run, options.allowance))
            print(f"{time.strftime('%H:%M:%S')} {table(rows[-1:]).splitlines()[-1]}", flush=True)
            if rows[-1].wrong:
                print(rows[-1].wrong, flush=True)
    print(
        f"\nHeartbeat {options.heartbeat:g} s, reduce {options.reduce:g} s, a step {options.pace:g} s.\n\n{table(rows)}"
    )
    return int(any(row.wrong for row in rows))


def main() -> int:
    """1 if a check has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[fault.key for fault in FAULTS])
    parser.add_argument("--soak", type=float, metavar="MINUTES")
    parser.add_argument(
        "--every",
        type=float,
        nargs=2,
        default=(20.0, 20.0),
        help="of --soak: seconds between two faults, from the end of one",
    )
    parser.add_argument("--faults", nargs="+", choices=SOAK_FAULTS, default=SOAK_FAULTS, help="of --soak")
    parser.add_argument("--poison_every", type=float, default=60.0, help="of --soak: seconds; 0: none")
    parser.add_argument("--bandwidth", help="of --soak: each site's link, as 50mbit; needs root")
    parser.add_argument("--round_trip_ms", type=float, default=0.0, help="of --soak: between two sites; needs root")
    parser.add_argument("--coordinators", type=int, default=1, help="of --soak")
    parser.add_argument("--outwards", type=int, default=0, help="of --soak: sites that drop connections; needs root")
    parser.add_argument("--skip_undisturbed", action="store_true", help="of --soak: compare no losses")
    parser.add_argument("--heartbeat", type=float, default=2.0)
    parser.add_argument("--reduce", type=float, default=5.0)
    parser.add_argument("--pace", type=float, default=0.03)
    parser.add_argument("--period", type=int, default=60, help="of --soak: steps between two rounds of a fragment")
    parser.add_argument("--allowance", type=float, default=3.0, help="seconds beyond the heartbeat")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds after which something is not awaited")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for logs and runs, which stays")
    options = parser.parse_args()
    folder = (options.keep or Path(tempfile.mkdtemp(prefix="faults-"))).resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process of the fleet is left
    try:
        write_inputs(folder)
        return (faults if options.soak is None else soak)(options, folder)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
