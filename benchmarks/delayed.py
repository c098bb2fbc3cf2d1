"""Held-out loss of one small model under PSDP with and without delayed updates (`sync.type: delayed_psdp`).

    python benchmarks/delayed.py RUNS [--rates 1e-3 4e-3] [--seeds 1 2 3] [--steps 400] [--warmup 100]

Every run is a whole one, `gregale train config/diloco_small.yaml` with a smaller model and PSDP: the same tokens in the
same order. The first WARMUP steps are without delay. The table has the held-out loss at the end, its mean and spread
over the seeds, by learning rate and delay.
Runs are kept in RUNS: a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from training_runs import rows_of

from gregale.methods.config import DelayedPsdpConfig, PsdpConfig
from gregale.services.config import TrainConfig
from gregale.services.memory import keep_memory
from gregale.services.parsing import load

CONFIG = Path(__file__).parent.parent / "config" / "diloco_small.yaml"
SMALL = (
    "--cpu_devices=2",
    "--mesh.replica=2",
    "--model.layers=3",
    "--model.hidden=48",
    "--model.heads=2",
    "--model.mlp=128",
    "--batch.size=32",
    "--batch.sequence_length=64",
    "--evaluation.every=100000",
    "--evaluation.batches=48",
    "--checkpoint.every=100000",
    "--log_every=20",
)
DELAYS = (0, 1, 2)


def configured(runs: Path, steps: int, rate: float, sync: PsdpConfig, seed: int) -> TrainConfig:
    config: TrainConfig = load(TrainConfig, CONFIG, [*SMALL, f"--steps={steps}", f"--optimizer.learning_rate={rate}"])
    name = f"psdp-steps{steps}-rate{rate:g}-delay{getattr(sync, 'delay', 0)}-seed{seed}"
    name += f"-warmup{sync.warm_up()}" if sync.warm_up() else ""
    return replace(config, name=name, runs=str(runs), seed=seed, sync=sync)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 4e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--warmup", type=int, default=100)
    options = parser.parse_args()
    keep_memory()
    found: dict[tuple[float, int], list[float]] = {}
    for rate in options.rates:
        for seed in options.seeds:
            for delay in DELAYS:
                sync = DelayedPsdpConfig(delay=delay, warmup_steps=options.warmup) if delay else PsdpConfig()
                rows = rows_of(configured(options.runs, options.steps, rate, sync, seed))
                found.setdefault((rate, delay), []).append(rows[options.steps]["eval_loss"])
    print(f"| learning rate | {' | '.join(f'delay {delay}' for delay in DELAYS)} |")
    print(f"|---|{'---|' * len(DELAYS)}")
    for rate in options.rates:
        cells = [f"{np.mean(found[rate, delay]):.4f} ± {np.std(found[rate, delay], ddof=1):.4f}" for delay in DELAYS]
        print(f"| {rate:g} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
