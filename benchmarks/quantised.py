"""Loss of a small byte-level transformer when replicas average through codecs, paired with float32 by seed.

    python benchmarks/quantised.py RUNS [--seeds 0 1 2] [--steps 400]

Four replicas; every run sees the same tokens in the same order and differs from its reference in `reduce` alone. The
noise of such a comparison is what a small disturbance does: `other summation` trains float32 again with each replica's
batch in two microbatches, and int8 loses next to nothing. Learning rates are low for so few steps, because at 0.003
AdamW made 0.02 nats of any disturbance. Runs are kept in RUNS: a second call goes on where the first one stopped, and
calls for other seeds may run beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from training_runs import rows_of

from gregale.codecs.config import FeedbackConfig, ReduceConfig
from gregale.methods.config import DilocoConfig, PsdpConfig, SyncConfig
from gregale.optim import AdamWConfig, MuonConfig, OptimizerConfig
from gregale.services.config import TrainConfig
from gregale.services.parsing import load

CONFIG = Path(__file__).parent.parent / "config" / "diloco_small.yaml"
SMALL = (
    "--model.layers=2",
    "--model.hidden=64",
    "--model.heads=4",
    "--model.mlp=192",
    "--batch.size=16",
    "--batch.sequence_length=64",
    "--evaluation.every=null",
    "--evaluation.batches=128",
    "--checkpoint.every=100000",
)
PSDP, DILOCO = PsdpConfig(), DilocoConfig(period=20)
ADAMW, MUON = AdamWConfig(learning_rate=1e-3), MuonConfig(learning_rate=5e-3)


def through(codec: str, second_leg: str, feedback: bool) -> ReduceConfig:
    return ReduceConfig(codec=codec, second_leg=second_leg, feedback=FeedbackConfig() if feedback else None)


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    label: str
    sync: SyncConfig
    reduce: ReduceConfig = field(default=ReduceConfig())
    optimizer: OptimizerConfig = field(default=ADAMW)
    options: tuple[str, ...] = ()

    @property
    def reference(self) -> tuple[SyncConfig, OptimizerConfig]:
        """What the row's float32 run shares with it."""
        return self.sync, self.optimizer


SETTINGS = [
    Setting("PSDP, none", PSDP),
    Setting("PSDP, none, other summation", PSDP, options=("--batch.microbatches=2",)),
    Setting("PSDP, int8 / int8", PSDP, through("int8", "int8", False)),
    Setting("PSDP, int4 / int4", PSDP, through("int4", "int4", False)),
    Setting("PSDP, int4 / int4, feedback", PSDP, through("int4", "int4", True)),
    Setting("PSDP, e3m0 / int8", PSDP, through("e3m0", "int8", False)),
    Setting("DiLoCo, none", DILOCO),
    Setting("DiLoCo, int8 / int8", DILOCO, through("int8", "int8", False)),
    Setting("DiLoCo, int8 / int8, feedback", DILOCO, through("int8", "int8", True)),
    Setting("DiLoCo, int4 / int4", DILOCO, through("int4", "int4", False)),
    Setting("DiLoCo, int4 / int4, feedback", DILOCO, through("int4", "int4", True)),
    Setting("DiLoCo, e3m0 / int8", DILOCO, through("e3m0", "int8", False)),
    Setting("DiLoCo, e3m0 / int8, feedback", DILOCO, through("e3m0", "int8", True)),
    Setting("DiLoCo, Muon inside, none", DILOCO, optimizer=MUON),
    Setting("DiLoCo, Muon inside, int2 / int4, feedback", DILOCO, through("int2", "int4", True), MUON),
    Setting("DiLoCo, Muon inside, int2 / int4", DILOCO, through("int2", "int4", False), MUON),
]


def final(setting: Setting, seed: int, steps: int, runs: Path) -> tuple[float, int]:
    """Held-out loss at the end, and the bytes that a device has sent over `replica`."""
    name = setting.label.replace(", ", "-").replace(" / ", "-").replace(" ", "-").lower()
    given = [f"--seed={seed}", f"--steps={steps}", f"--name={name}-seed{seed}-steps{steps}", *SMALL, *setting.options]
    config: TrainConfig = load(TrainConfig, CONFIG, given)
    optimizer = replace(setting.optimizer, schedule=config.optimizer.schedule)
    config = replace(config, sync=setting.sync, reduce=setting.reduce, optimizer=optimizer, runs=str(runs))
    last = rows_of(config)[steps]
    return last["eval_loss"], last["replica_bytes"]


def table(results: dict[str, list[tuple[float, int]]]) -> Iterable[str]:
    """Markdown: loss, gap to the float32 run of the same seed with its spread, and how many times fewer bytes."""
    references = {s.reference: results[s.label] for s in SETTINGS if not s.reduce.quantised and not s.options}
    exact_bytes = results[SETTINGS[0].label][0][1]
    yield "| averages | held-out loss, nats | gap to float32 (each seed) | fewer bytes than float32 PSDP |"
    yield "|---|---|---|---|"
    for setting in SETTINGS:
        found, reference = results[setting.label], references[setting.reference]
        gaps = [mine[0] - exact[0] for mine, exact in zip(found, reference, strict=True)]
        shown = "" if found is reference else f"{np.mean(gaps):+.4f} ({', '.join(f'{gap:+.4f}' for gap in gaps)})"
        fewer = exact_bytes / found[0][1]
        yield f"| {setting.label} | {np.mean([loss for loss, _ in found]):.4f} | {shown} | {fewer:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss with averages through codecs, paired with float32.")
    parser.add_argument("runs", type=Path, help="folder for the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    results = {s.label: [final(s, seed, options.steps, options.runs) for seed in options.seeds] for s in SETTINGS}
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
