"""Held-out loss of a small model under several methods, or when replicas average through codecs, paired by seed.

    python benchmarks/losses.py RUNS methods [--seeds 1 2 3]    # PSDP and DiLoCo, AdamW and Muon inside: an hour a core
    python benchmarks/losses.py RUNS codecs [--seeds 0 1 2]     # float32 and codecs: half an hour

Each run is `gregale train config/diloco_small.yaml` with a smaller model: the same tokens in the same order. The rates
of `methods` are those that a search on seed 0 found (docs/diloco.md). Runs are kept in RUNS: a second call continues.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from gregale.codecs.config import FeedbackConfig, ReduceConfig
from gregale.distributed.malloc_tuning import keep_memory
from gregale.methods.config import OUTER, DilocoConfig, PsdpConfig, StreamingDilocoConfig, SyncConfig
from gregale.optim import AdamWConfig, MuonConfig, OptimizerConfig
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.runs.run_directory import RunDirectory

CONFIG = Path(__file__).parent.parent / "config" / "diloco_small.yaml"
COMMON = ("--evaluation.every=null", "--checkpoint.every=100000", "--log_every=10")
SIZES = {
    "methods": "--steps=600 --model.layers=3 --model.hidden=48 --model.heads=2 --model.mlp=128 --batch.size=64"
    " --batch.sequence_length=32 --evaluation.batches=24",
    "codecs": "--steps=400 --model.layers=2 --model.hidden=64 --model.heads=4 --model.mlp=192 --batch.size=16"
    " --batch.sequence_length=64 --evaluation.batches=128",
}


@dataclass(frozen=True)
class Setting:
    """One row of a table; `reference`: the label of the row that it is compared with."""

    label: str
    reference: str
    sync: SyncConfig
    optimizer: OptimizerConfig
    reduce: ReduceConfig = field(default=ReduceConfig())
    options: tuple[str, ...] = ()


def diloco(config: DilocoConfig, rate: float, momentum: float = 0.0) -> DilocoConfig:
    """Return the method with an outer rate; rate 1 without momentum is the plain average of the replicas."""
    return replace(config, outer=replace(OUTER, learning_rate=rate, momentum=momentum, nesterov=momentum > 0))


def of_methods() -> Iterable[Setting]:
    rates = {
        "adamw": (AdamWConfig(learning_rate=0.004), (1.0, 0.0), (0.2, 0.9), (1.0, 0.0), (1.0, 0.0)),
        "muon": (MuonConfig(learning_rate=0.016), (1.4, 0.0), (1.0, 0.0), (1.4, 0.0), (1.4, 0.0)),
    }
    for inner, (optimizer, *outer) in rates.items():
        reference = f"{inner}, PSDP"
        yield Setting(reference, reference, PsdpConfig(), optimizer)
        configs = [DilocoConfig(period=10), DilocoConfig(period=30), DilocoConfig(period=100)]
        configs.append(StreamingDilocoConfig(period=30))
        for config, rate in zip(configs, outer, strict=True):
            name = f"{inner}, {config.get_choice_name(type(config))}, H {config.period}"
            yield Setting(name, reference, diloco(config, *rate), optimizer)


def of_codecs() -> Iterable[Setting]:
    adamw, muon = AdamWConfig(learning_rate=1e-3), MuonConfig(learning_rate=5e-3)
    psdp, outer = PsdpConfig(), DilocoConfig(period=20)
    both = ("int8 int8", "int4 int4", "e3m0 int8")
    rows: list[tuple[str, SyncConfig, OptimizerConfig, list[str]]] = [
        ("PSDP", psdp, adamw, ["int8 int8", "int4 int4", "int4 int4 feedback", "e3m0 int8"]),
        ("DiLoCo", outer, adamw, [each + more for each in both for more in ("", " feedback")]),
        ("DiLoCo with Muon", outer, muon, ["int2 int4 feedback", "int2 int4"]),
    ]
    for name, sync, optimizer, codecs in rows:
        reference = f"{name}, none"
        yield Setting(reference, reference, sync, optimizer)
        if sync is psdp:  # what a small disturbance does: the noise of such a comparison
            yield Setting(f"{name}, other summation", reference, sync, optimizer, options=("--batch.microbatches=2",))
        for each in codecs:
            first, second, *feedback = each.split()
            reduce = ReduceConfig(codec=first, gather_codec=second, feedback=FeedbackConfig() if feedback else None)
            yield Setting(f"{name}, {each}", reference, sync, optimizer, reduce)


def final(setting: Setting, size: str, seed: int, runs: Path) -> tuple[float, int]:
    """Train, continue or read a run; return its held-out loss and the bytes that a device sent over `replica`."""
    from gregale.programs.train.command import TrainOptions, main

    name = f"{setting.label.replace(', ', '-').replace(' ', '_').lower()}-seed{seed}"
    given = [f"--seed={seed}", f"--name={name}", *COMMON, *SIZES[size].split(), *setting.options]
    config: TrainConfig = load(TrainConfig, CONFIG, given)
    optimizer = replace(setting.optimizer, schedule=config.optimizer.schedule)
    config = replace(config, sync=setting.sync, reduce=setting.reduce, optimizer=optimizer, runs=str(runs))
    run = RunDirectory(runs / name)
    done = run.config.is_file() and run.read_config() == config and run.has_evaluation(config.steps)
    if not done and main(TrainOptions(), config):
        raise SystemExit("stopped; the same command continues")
    last: dict = {}
    for line in run.metrics.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        last |= row if row["step"] == config.steps else {}
    return last["eval_loss"], last["replica_bytes"]


def table(results: dict[Setting, list[tuple[float, int]]]) -> Iterable[str]:
    """Markdown: loss, the gap to the reference of the same seed, and how many times fewer bytes than the first row."""
    by_label = {setting.label: found for setting, found in results.items()}
    most = next(iter(results.values()))[0][1]
    yield "| run | held-out loss, nats | gap to its reference (each seed) | fewer bytes |"
    yield "|---|---|---|---|"
    for setting, found in results.items():
        gaps = [mine[0] - other[0] for mine, other in zip(found, by_label[setting.reference], strict=True)]
        gap = f"{np.mean(gaps):+.4f} ({', '.join(f'{each:+.4f}' for each in gaps)})"
        shown = "" if setting.label == setting.reference else gap
        loss = np.mean([each for each, _ in found])
        yield f"| {setting.label} | {loss:.4f} | {shown} | {most / found[0][1]:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder for the runs")
    parser.add_argument("table", choices=SIZES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    keep_memory()
    settings = list(of_methods() if options.table == "methods" else of_codecs())
    found = {each: [final(each, options.table, seed, options.runs) for seed in options.seeds] for each in settings}
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
