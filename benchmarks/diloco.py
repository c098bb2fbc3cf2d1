"""Held-out loss of one small model under PSDP, DiLoCo and Streaming DiLoCo, against tokens and against bytes sent.

    python benchmarks/diloco.py RUNS [--seeds 1 2] [--rates 1e-3 0.3 0.5 0.7 0.5] [--figure FILE.svg]

Every run is `gregale train config/diloco_small.yaml` with another `sync`: the same tokens in the same order, the same
inner optimizer and learning rate. All start with the same steps of PSDP (`sync.warmup_steps`; the paper pretrains
too), which are trained once a seed: the methods go on from that checkpoint. The inner rate is the best of a few for
PSDP, the outer rate of each other method the best of a few for it; both are chosen on seed 0, by the held-out loss at
the end; `--rates` gives them instead, the inner one and that of each method. The table is of the other seeds. Runs are
kept in RUNS: a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from training_runs import rows_of

from gregale.methods.config import DilocoConfig, PsdpConfig, StreamingDilocoConfig, SyncConfig
from gregale.services.config import TrainConfig
from gregale.services.parsing import load

CONFIG = Path(__file__).parent.parent / "config" / "diloco_small.yaml"
INNER_RATES = (5e-4, 1e-3, 2e-3)
OUTER_RATES = (0.3, 0.5, 0.7, 1.0)
TUNING_SEED = 0
WARMUP = 600
PSDP = "PSDP"
METHODS: dict[str, DilocoConfig] = {
    "DiLoCo, H 10": DilocoConfig(period=10, warmup_steps=WARMUP),
    "DiLoCo, H 30": DilocoConfig(period=30, warmup_steps=WARMUP),
    "DiLoCo, H 100": DilocoConfig(period=100, warmup_steps=WARMUP),
    "streaming, H 30": StreamingDilocoConfig(period=30, fragments=4, delay=1, alpha=0.5, warmup_steps=WARMUP),
}


@dataclass(frozen=True)
class Run:
    """What one run measured: every array is [evaluation]."""

    tokens: np.ndarray
    bytes_sent: np.ndarray  # of one device over `replica`
    loss: np.ndarray  # held out, nats a token
    warmup_bytes: int  # sent until the end of the warm-up

    def after_warmup(self) -> int:
        return self.bytes_sent[-1] - self.warmup_bytes


@dataclass(frozen=True)
class Trainer:
    """Trains the model of `CONFIG`, each run once."""

    runs: Path

    def psdp(self, inner_rate: float, seed: int) -> Run:
        """PSDP from the beginning; its checkpoint after the warm-up stays."""
        return self._run(f"psdp-inner{inner_rate:g}-seed{seed}", PsdpConfig(), inner_rate, seed)

    def diloco(self, sync: DilocoConfig, inner_rate: float, seed: int) -> Run:
        """`sync`, from PSDP's checkpoint after the warm-up."""
        method, rate = sync.get_choice_name(type(sync)), sync.outer.learning_rate
        folder = f"{method}-H{sync.period}-outer{rate:g}-inner{inner_rate:g}-seed{seed}"
        self._start_from(self.runs / f"psdp-inner{inner_rate:g}-seed{seed}", self.runs / folder)
        return self._run(folder, sync, inner_rate, seed)

    def _run(self, folder: str, sync: SyncConfig, inner_rate: float, seed: int) -> Run:
        config = load(TrainConfig, CONFIG, [f"--optimizer.learning_rate={inner_rate}", f"--seed={seed}"])
        config = replace(config, sync=sync, runs=str(self.runs / folder))
        return measured(rows_of(config), config.batch.tokens)

    def _start_from(self, psdp: Path, folder: Path) -> None:
        """A copy of a run as it was after the warm-up, made under a temporary name."""
        if folder.exists():
            return
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        later = [f"step-{step:08d}" for step in range(WARMUP + 1, load(TrainConfig, CONFIG).steps + 1)]
        shutil.copytree(psdp, partial, ignore=shutil.ignore_patterns(*later))
        partial.rename(folder)


def measured(rows: dict[int, dict], tokens_per_step: int) -> Run:
    """Tokens, bytes and loss at each evaluation of a run."""
    evaluated = [row for row in rows.values() if "eval_loss" in row]
    return Run(
        tokens=np.array([row["step"] * tokens_per_step for row in evaluated]),
        bytes_sent=np.array([row["replica_bytes"] for row in evaluated]),
        loss=np.array([row["eval_loss"] for row in evaluated]),
        warmup_bytes=rows[WARMUP]["replica_bytes"],
    )


def best(losses: dict[float, float], what: str) -> float:
    """The rate with the lowest loss; all of them are printed."""
    print(f"{what}: " + ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses.items()), flush=True)
    return min(losses, key=lambda rate: losses[rate])


def tuned(train: Trainer) -> tuple[float, dict[str, DilocoConfig]]:
    """The shared inner rate, and each method with its own outer rate."""
    inner = best({rate: train.psdp(rate, TUNING_SEED).loss[-1] for rate in INNER_RATES}, "inner rate")
    methods = {}
    for label, sync in METHODS.items():
        tried = {rate: with_outer_rate(sync, rate) for rate in OUTER_RATES}
        losses = {rate: train.diloco(each, inner, TUNING_SEED).loss[-1] for rate, each in tried.items()}
        methods[label] = tried[best(losses, f"outer rate of {label}")]
    return inner, methods


def with_outer_rate(sync: DilocoConfig, rate: float) -> DilocoConfig:
    return replace(sync, outer=replace(sync.outer, learning_rate=rate))


def table(methods: dict[str, DilocoConfig], results: dict[str, list[Run]]) -> Iterable[str]:
    """Markdown: losses at the end, the gap to PSDP paired by seed, and bytes sent after the warm-up."""
    reference = results[PSDP]
    yield "| method | outer rate | held-out loss, nats | gap to PSDP (least, most) | bytes over `replica` | fewer |"
    yield "|---|---|---|---|---|---|"
    for label, runs in results.items():
        rate = f"{methods[label].outer.learning_rate:g}" if label in methods else ""
        gaps = [run.loss[-1] - same.loss[-1] for run, same in zip(runs, reference, strict=True)]
        sent, most = runs[0].after_warmup(), reference[0].after_warmup()
        yield (
            f"| {label} | {rate} | {np.mean([run.loss[-1] for run in runs]):.4f} "
            f"| {np.mean(gaps):+.4f} ({min(gaps):+.4f}, {max(gaps):+.4f}) | {sent / 1e6:,.0f} MB | {most / sent:.1f} |"
        )


def draw(path: Path, results: dict[str, list[Run]]) -> None:
    """Loss since the warm-up against tokens and against bytes, mean over seeds."""
    from gregale.timeline.plot import new_figure, save_figure

    figure = new_figure(path, (9.0, 4.2))
    over_tokens, over_bytes = figure.subplots(1, 2, sharey=True)
    for label, runs in results.items():
        loss = np.mean([run.loss for run in runs], axis=0)
        sent = runs[0].bytes_sent - runs[0].warmup_bytes
        since = sent >= 0
        over_tokens.plot(runs[0].tokens[since] / 1e6, loss[since], label=label, marker=".")
        over_bytes.plot(sent[sent > 0] / 1e6, loss[sent > 0], marker=".")
    over_bytes.set_xscale("log")
    over_tokens.set_xlabel("tokens, millions")
    over_bytes.set_xlabel("sent over replica by a device since the warm-up, MB")
    over_tokens.set_ylabel("held-out loss, nats a token")
    for axes in (over_tokens, over_bytes):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out loss of PSDP, DiLoCo and Streaming DiLoCo.")
    parser.add_argument("runs", type=Path, help="folder for the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rates", type=float, nargs=1 + len(METHODS), help="inner, and each method's outer: not tuned")
    parser.add_argument("--figure", type=Path, help="write the picture here (.svg or .png)")
    options = parser.parse_args()
    train = Trainer(options.runs)
    if options.rates:
        inner, *outer = options.rates
        methods = {label: with_outer_rate(METHODS[label], rate) for label, rate in zip(METHODS, outer, strict=True)}
    else:
        inner, methods = tuned(train)
    results = {PSDP: [train.psdp(inner, seed) for seed in options.seeds]}
    for label, sync in methods.items():
        results[label] = [train.diloco(sync, inner, seed) for seed in options.seeds]
    print("\n".join(table(methods, results)))
    if options.figure:
        draw(options.figure, results)


if __name__ == "__main__":
    main()
