"""Held-out loss of one small model under PSDP, DiLoCo and Streaming DiLoCo, against tokens and against bytes sent.

    python benchmarks/diloco.py RUNS [--steps 600] [--seeds 1 2] [--figure docs/figures/diloco-small.svg]

Every run is `gregale train config/diloco_small.yaml` with another `sync`: the same tokens in the same order, the same
inner optimizer and learning rate. The inner rate is the best of a few for PSDP, the outer rate of each other method the
best of a few for it; both are chosen on seed 0 and a shorter run, by the held-out loss at its end, and the table is of
the other seeds. Runs are kept in RUNS: a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gregale.methods.config import DilocoConfig, PsdpConfig, StreamingDilocoConfig, SyncConfig
from gregale.services.config import TrainConfig
from gregale.services.parsing import load

CONFIG = Path(__file__).parent.parent / "config" / "diloco_small.yaml"
INNER_RATES = (1e-3, 2e-3, 4e-3)
OUTER_RATES = (0.3, 0.5, 0.7, 1.0)
TUNING_SEED = 0
METHODS: dict[str, SyncConfig] = {
    "PSDP": PsdpConfig(),
    "DiLoCo, H 10": DilocoConfig(period=10),
    "DiLoCo, H 30": DilocoConfig(period=30),
    "DiLoCo, H 100": DilocoConfig(period=100),
    "streaming, H 30": StreamingDilocoConfig(period=30, fragments=4, delay=1, alpha=0.5),
}


@dataclass(frozen=True)
class Run:
    """What one run measured: every array is [evaluation]."""

    tokens: np.ndarray
    bytes_sent: np.ndarray  # of one device over `replica`
    loss: np.ndarray  # held out, nats a token


@dataclass(frozen=True)
class Trainer:
    """Trains the model of `CONFIG`, each run once."""

    runs: Path

    def __call__(self, sync: SyncConfig, inner_rate: float, seed: int, steps: int, *options: str) -> Run:
        """Trains with `sync`; `options` are further ones of the command line."""
        given = [f"--steps={steps}", f"--optimizer.learning_rate={inner_rate}", f"--seed={seed}", *options]
        name = name_of(sync, inner_rate, seed, steps)
        config = replace(load(TrainConfig, CONFIG, given), name=name, sync=sync, runs=str(self.runs))
        self._train(config)
        return measured(self.runs / name / "metrics.jsonl", config.batch.tokens)

    def final_loss(self, sync: SyncConfig, inner_rate: float, steps: int) -> float:
        """The held-out loss at the end of a run for tuning."""
        return self(sync, inner_rate, TUNING_SEED, steps, "--evaluation.every=null").loss[-1]

    def _train(self, config: TrainConfig) -> None:
        from gregale.programs.train import TrainOptions, main

        print(f"--- {config.name}", flush=True)
        if main(TrainOptions(), config):
            raise SystemExit("stopped; the same command goes on from there")


def name_of(sync: SyncConfig, inner_rate: float, seed: int, steps: int) -> str:
    """A name that tells everything in which the runs differ."""
    parts = [sync.get_choice_name(type(sync))]
    if isinstance(sync, DilocoConfig):
        parts += [f"H{sync.period}", f"outer{sync.outer.learning_rate:g}"]
    return "-".join([*parts, f"inner{inner_rate:g}", f"seed{seed}", f"steps{steps}"])


def measured(metrics: Path, tokens_per_step: int) -> Run:
    """Tokens, bytes and loss at each evaluation of a run."""
    rows: dict[int, dict] = {}
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    evaluated = [row for row in rows.values() if "eval_loss" in row]
    return Run(
        tokens=np.array([row["step"] * tokens_per_step for row in evaluated]),
        bytes_sent=np.array([row["replica_bytes"] for row in evaluated]),
        loss=np.array([row["eval_loss"] for row in evaluated]),
    )


def with_outer_rate(sync: SyncConfig, rate: float) -> SyncConfig:
    assert isinstance(sync, DilocoConfig)
    return replace(sync, outer=replace(sync.outer, learning_rate=rate))


def best(losses: dict[float, float], what: str) -> float:
    """The rate with the lowest loss; all of them are printed."""
    print(f"{what}: " + ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses.items()), flush=True)
    return min(losses, key=lambda rate: losses[rate])


def tuned(train: Trainer, steps: int) -> tuple[float, dict[str, SyncConfig]]:
    """The shared inner rate, and each method with its own outer rate."""
    losses = {rate: train.final_loss(PsdpConfig(), rate, steps) for rate in INNER_RATES}
    inner = best(losses, "inner rate")
    methods = {}
    for label, sync in METHODS.items():
        if not isinstance(sync, DilocoConfig):
            methods[label] = sync
            continue
        tried = {rate: with_outer_rate(sync, rate) for rate in OUTER_RATES}
        losses = {rate: train.final_loss(each, inner, steps) for rate, each in tried.items()}
        methods[label] = tried[best(losses, f"outer rate of {label}")]
    return inner, methods


def table(methods: dict[str, SyncConfig], results: dict[str, list[Run]]) -> Iterable[str]:
    """Markdown: losses at the end, the gap to PSDP paired by seed, and bytes."""
    reference = results["PSDP"]
    yield "| method | outer rate | held-out loss, nats | gap to PSDP (least, most) | bytes over `replica` | fewer |"
    yield "|---|---|---|---|---|---|"
    for label, runs in results.items():
        sync = methods[label]
        rate = f"{sync.outer.learning_rate:g}" if isinstance(sync, DilocoConfig) else ""
        gaps = [run.loss[-1] - same.loss[-1] for run, same in zip(runs, reference, strict=True)]
        sent, most = runs[0].bytes_sent[-1], reference[0].bytes_sent[-1]
        yield (
            f"| {label} | {rate} | {np.mean([run.loss[-1] for run in runs]):.4f} "
            f"| {np.mean(gaps):+.4f} ({min(gaps):+.4f}, {max(gaps):+.4f}) | {sent / 1e6:,.0f} MB | {most / sent:.1f} |"
        )


def draw(path: Path, results: dict[str, list[Run]]) -> None:
    """Loss against tokens and against bytes, mean over seeds."""
    from gregale.timeline.plot import new_figure, save_figure

    figure = new_figure(path, (9.0, 4.2))
    over_tokens, over_bytes = figure.subplots(1, 2, sharey=True)
    for label, runs in results.items():
        loss = np.mean([run.loss for run in runs], axis=0)
        over_tokens.plot(runs[0].tokens / 1e6, loss, label=label, marker=".")
        sent = runs[0].bytes_sent > 0
        over_bytes.plot(runs[0].bytes_sent[sent] / 1e6, loss[sent], marker=".")
    over_bytes.set_xscale("log")
    over_tokens.set_xlabel("tokens, millions")
    over_bytes.set_xlabel("sent over replica by a device, MB")
    over_tokens.set_ylabel("held-out loss, nats a token")
    for axes in (over_tokens, over_bytes):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out loss of PSDP, DiLoCo and Streaming DiLoCo.")
    parser.add_argument("runs", type=Path, help="folder for the runs")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tuning-steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--figure", type=Path, help="write the picture here (.svg or .png)")
    options = parser.parse_args()
    train = Trainer(options.runs)
    inner, methods = tuned(train, options.tuning_steps)
    results = {
        label: [train(sync, inner, seed, options.steps) for seed in options.seeds] for label, sync in methods.items()
    }
    print("\n".join(table(methods, results)))
    if options.figure:
        draw(options.figure, results)


if __name__ == "__main__":
    main()
