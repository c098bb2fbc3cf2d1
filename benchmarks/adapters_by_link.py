"""Two islands in network namespaces that tune a model over a slow link: with adapters, and all of it (as root).

    python -m benchmarks.adapters_by_link FOLDER --bandwidth 10mbit

Prints for each the median seconds of a step, waits included, and the share of the time that each island waits.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.faults import write_inputs
from tests.fleet import GREGALE, Fleet, Seconds, metrics
from tests.namespaces import rate_limited

NAMES, ROUNDS, PERIOD = ("a", "b"), 6, 20
CONFIG = """
steps: 100000
cpu_devices: 1
mesh: {data: 1}
model: {type: llama, layers: 8, hidden: 320, heads: 5, kv_heads: 5, mlp: 928}
compute: {dtype: float32, remat: none}
data: {sources: {words: {type: text, files: ["text/*.txt"]}}, held_out: 0.2, workers: 1}
batch: {size: 2, sequence_length: 64}
optimizer: {type: adamw, learning_rate: 0.001, schedule: {type: constant, warmup: 0}}
checkpoint: {every: 100000}
"""
TUNED = f"""
start_from: runs/base
sync: {{type: diloco, period: {PERIOD}}}
islands: {{min_members: 2, min_members_to_start: 2, network: wan}}
"""
ADAPTER = "adapter: {type: lora, rank: 16, targets: [query, value]}\n"


def measured(folder: Path, config: str, bandwidth: str) -> str:
    """Return a table's cells: parameters that train, a step's seconds, the waiting shares of the islands."""
    with (
        rate_limited(len(NAMES), bandwidth) as network,
        Fleet(folder, config, Seconds(20.0, 600.0), ("--runs", Path(config).stem), network=network) as fleet,
    ):
        runs = [folder / Path(config).stem / name for name in NAMES]
        for name in NAMES:
            fleet.start(name)
        wanted = (ROUNDS + 1) * PERIOD
        fleet.wait(lambda: all(len(metrics(run)) >= wanted for run in runs), 1800, f"{wanted} steps")
        shares, steps = [], []
        for run in runs:
            lines = metrics(run)[PERIOD : wanted + 1]  # without the first round, in which programs are compiled
            seconds = [line["elapsed_seconds"] for line in lines]
            whole = seconds[-1] - seconds[0]
            shares.append((lines[-1]["waiting_seconds"] - lines[0]["waiting_seconds"]) / whole)
            steps.append(whole / (len(lines) - 1))
    return f"{statistics.median(steps):.3f} s | {' and '.join(f'{share:.0%}' for share in shares)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for logs and runs; a new one")
    parser.add_argument("--bandwidth", default="10mbit", help="of each island's link, as tc writes it")
    options = parser.parse_args()
    folder = options.folder.resolve()
    write_inputs(folder)
    for name, text in (("base", ""), ("whole", TUNED), ("adapters", TUNED + ADAPTER)):
        (folder / f"{name}.yaml").write_text(CONFIG + text)
    subprocess.run([*GREGALE, "train", "base.yaml", "--name", "base", "--steps", "2"], cwd=folder, check=True)
    print("| trained | a step, waits included | of the time, islands wait |\n|---|---|---|")
    for name in ("adapters", "whole"):
        print(f"| {name} | {measured(folder, f'{name}.yaml', options.bandwidth)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
