"""Held-out loss of one small model under PSDP, DiLoCo and Streaming DiLoCo, against tokens and against bytes sent.

    python benchmarks/diloco.py RUNS [--inner adamw muon] [--methods ...] [--seeds 1 2 3] [--trials] [--figure FILE.svg]

Every run is a whole one, `gregale train config/diloco_small.yaml` with a smaller model, without a warm-up and with
another `sync`: the same tokens in the same order. Rates are chosen on seed 0, by the held-out loss at the end, on the
ladders `INNER_RATES` and `OUTER_RATES`: a rate is taken when its neighbours are no better. PSDP gets its inner rate so,
with each inner optimizer. DiLoCo at H 30 begins there, and gets its outer rate and then its inner one, in turn until
neither moves; the other methods begin with the rates of H 30 and get their outer rate. The outer optimizer has momentum
0.9, unless the plain average of the replicas (rate 1 without momentum) is better. The table is of the other seeds.
`--trials` adds, on all seeds, the default outer optimizer and the plain average, streaming with another alpha or delay,
and DiLoCo after a warm-up of PSDP.

Runs are kept in RUNS: a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from training_runs import is_done, rows_of

from gregale.methods.config import OUTER, DilocoConfig, PsdpConfig, StreamingDilocoConfig, SyncConfig
from gregale.optim import AdamWConfig, MuonConfig, OptimizerConfig
from gregale.services.config import TrainConfig
from gregale.services.memory import keep_memory
from gregale.services.parsing import load

CONFIG = Path(__file__).parent.parent / "config" / "diloco_small.yaml"
SMALL = (
    "--steps=600",
    "--model.layers=3",
    "--model.hidden=48",
    "--model.heads=2",
    "--model.mlp=128",
    "--batch.size=64",
    "--batch.sequence_length=32",
    "--evaluation.every=50",
    "--evaluation.batches=24",
    "--checkpoint.every=100000",
    "--log_every=10",
)
INNER: dict[str, OptimizerConfig] = {"adamw": AdamWConfig(), "muon": MuonConfig()}
INNER_RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
OUTER_RATES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.4)
TUNING_SEED = 0
PSDP, FIRST, STREAMING = "PSDP", "DiLoCo, H 30", "streaming, H 30"
METHODS: dict[str, DilocoConfig] = {
    "DiLoCo, H 10": DilocoConfig(period=10),
    FIRST: DilocoConfig(period=30),
    "DiLoCo, H 100": DilocoConfig(period=100),
    STREAMING: StreamingDilocoConfig(period=30),
}
PLAIN = {"outer": 1.0, "momentum": 0.0}  # the average of the replicas, as it is
DEFAULT = {"outer": OUTER.learning_rate, "momentum": OUTER.momentum}
TRIALS: list[tuple[str, dict[str, float], dict[str, float]]] = [  # method, what is changed of it and of its rates
    (FIRST, {}, PLAIN),
    (FIRST, {}, DEFAULT),
    ("DiLoCo, H 100", {}, DEFAULT),
    (FIRST, {"warmup_steps": 60}, {}),
    ("DiLoCo, H 10", {"warmup_steps": 300}, PLAIN),
    ("DiLoCo, H 10", {"warmup_steps": 300}, {"outer": 0.3, "momentum": 0.9}),
    (STREAMING, {"alpha": 0.0}, {}),
    (STREAMING, {"delay": 1}, {}),
]
TUNING_RUNS = 21  # of one inner optimizer where every first guess is the best; for the estimate of time left


@dataclass(frozen=True)
class Rates:
    """What is tuned of a method; PSDP has no outer rate."""

    inner: float
    outer: float | None = None
    momentum: float = OUTER.momentum  # of the outer optimizer

    def __str__(self) -> str:
        return f"{self.inner:g}" if self.outer is None else f"{self.inner:g} and {self.shown_outer}"

    @property
    def shown_outer(self) -> str:
        """The outer rate; without momentum, 1 is the plain average of the replicas."""
        return "" if self.outer is None else f"{self.outer:g}" if self.momentum else f"{self.outer:g}, no momentum"


@dataclass(frozen=True)
class Run:
    """What one run measured: every array is [evaluation]."""

    tokens: np.ndarray
    bytes_sent: np.ndarray  # of one device over `replica`
    loss: np.ndarray  # held out, nats a token


@dataclass
class Trainer:
    """Trains the small model, each run once, and says how long the rest will take."""

    runs: Path
    expected: int  # runs in all, about
    done: dict[str, Run] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # of each run that this process trained

    def run(self, inner: str, sync: SyncConfig, rates: Rates, seed: int) -> Run:
        config = configured(inner, sync, rates, seed, self.runs)
        if config.name not in self.done:
            begun, known = time.monotonic(), is_done(config)
            self.done[config.name] = measured(rows_of(config), config.batch.tokens)
            if not known:
                self.seconds.append(time.monotonic() - begun)
                self.say_time_left()
        return self.done[config.name]

    def say_time_left(self) -> None:
        left = max(0, self.expected - len(self.done)) * float(np.mean(self.seconds[-10:]))
        print(f"=== {len(self.done)} of about {self.expected} runs, about {left / 60:.0f} min left", flush=True)


def configured(inner: str, sync: SyncConfig, rates: Rates, seed: int, runs: Path) -> TrainConfig:
    """The run of a method, named after all in which runs differ."""
    config: TrainConfig = load(TrainConfig, CONFIG, SMALL)
    name = f"{inner}-psdp"
    if isinstance(sync, DilocoConfig):
        assert rates.outer is not None
        outer = replace(OUTER, learning_rate=rates.outer, momentum=rates.momentum, nesterov=rates.momentum > 0)
        sync = replace(sync, outer=outer)
        name = f"{inner}-{sync.get_choice_name(type(sync))}-H{sync.period}-outer{rates.outer:g}"
        if rates.momentum != OUTER.momentum:
            name += f"-momentum{rates.momentum:g}"
    if isinstance(sync, StreamingDilocoConfig):
        name += f"-delay{sync.delay}-alpha{sync.alpha:g}"
    if sync.warm_up():
        name += f"-warmup{sync.warm_up()}"
    optimizer = replace(INNER[inner], learning_rate=rates.inner, schedule=config.optimizer.schedule)
    name += f"-inner{rates.inner:g}-seed{seed}"
    return replace(config, name=name, runs=str(runs), seed=seed, sync=sync, optimizer=optimizer)


def measured(rows: dict[int, dict], tokens_per_step: int) -> Run:
    """Tokens, bytes and loss at each evaluation of a run."""
    evaluated = [row for row in rows.values() if "eval_loss" in row]
    return Run(
        tokens=np.array([row["step"] * tokens_per_step for row in evaluated]),
        bytes_sent=np.array([row["replica_bytes"] for row in evaluated]),
        loss=np.array([row["eval_loss"] for row in evaluated]),
    )


def climb(loss: Callable[[float], float], ladder: Sequence[float], start: float) -> float:
    """The rate of a ladder whose neighbours are no better, found from `start` by going to the best neighbour."""
    at = ladder.index(start)
    while True:
        best = min(
            range(max(0, at - 1), min(len(ladder), at + 2)), key=lambda place: (loss(ladder[place]), place != at)
        )
        if best == at:
            return ladder[at]
        at = best


@dataclass(frozen=True)
class Tuning:
    """The search of one inner optimizer's rates on the tuning seed, and every loss it saw."""

    train: Trainer
    inner: str
    methods: Sequence[str] = tuple(METHODS)
    tried: dict[str, dict[Rates, float]] = field(default_factory=dict)

    def loss(self, label: str, sync: SyncConfig, rates: Rates) -> float:
        found = float(self.train.run(self.inner, sync, rates, TUNING_SEED).loss[-1])
        return self.tried.setdefault(label, {}).setdefault(rates, found)

    def chosen(self) -> dict[str, Rates]:
        """Each method's rates."""
        psdp = climb(lambda rate: self.loss(PSDP, PsdpConfig(), Rates(rate)), INNER_RATES, 4e-3)
        first = self.both(FIRST, Rates(psdp, 0.2))
        rates = {PSDP: Rates(psdp), FIRST: first}
        rates |= {label: self.outer(label, first) for label in self.methods if label != FIRST}
        return {label: rates[label] for label in (PSDP, *self.methods)}

    def both(self, label: str, start: Rates) -> Rates:
        """Outer and inner rate in turn, until neither moves."""
        best = self.outer(label, start)
        inner = climb(
            lambda rate: self.loss(label, METHODS[label], replace(best, inner=rate)), INNER_RATES, start.inner
        )
        return best if inner == start.inner else self.both(label, replace(start, inner=inner))

    def outer(self, label: str, start: Rates) -> Rates:
        """The outer rate with momentum, or the plain average if that is better; `start` has momentum."""

        def loss(rates: Rates) -> float:
            return self.loss(label, METHODS[label], rates)

        assert start.outer is not None
        found = climb(lambda rate: loss(replace(start, outer=rate)), OUTER_RATES, start.outer)
        return min(replace(start, outer=found), replace(start, outer=1.0, momentum=0.0), key=loss)

    def trial(self, label: str, changed: dict, other: dict, chosen: dict[str, Rates], seeds: Sequence[int]) -> str:
        """A line: the losses of a method with a change, at its rates or others, on the tuning seed and `seeds`."""
        sync, rates = replace(METHODS[label], **changed), replace(chosen[label], **other)
        what = "".join(f", {key} {value:g}" for key, value in changed.items())
        every = {seed: self.train.run(self.inner, sync, rates, seed).loss[-1] for seed in (TUNING_SEED, *seeds)}
        losses = ", ".join(f"{loss:.4f} (seed {seed})" for seed, loss in every.items())
        return f"{self.inner}, {label}{what}, {rates}: {losses}"

    def lines(self) -> Iterable[str]:
        for label, losses in self.tried.items():
            ordered = sorted(losses.items(), key=lambda item: (item[0].inner, item[0].outer or 0))
            yield f"{self.inner}, {label}: " + "; ".join(f"{rates}: {loss:.4f}" for rates, loss in ordered)


def table(inner: str, chosen: dict[str, Rates], results: dict[str, list[Run]]) -> Iterable[str]:
    """Markdown: rates, losses at the end, the gap to PSDP paired by seed, and bytes of the whole run."""
    reference = results[PSDP]
    yield "| inside | method | inner rate | outer rate | held-out loss, nats | gap to PSDP (each seed) | sent | fewer |"
    yield "|---|---|---|---|---|---|---|---|"
    for label, runs in results.items():
        rates = chosen[label]
        gaps = [run.loss[-1] - same.loss[-1] for run, same in zip(runs, reference, strict=True)]
        shown = "" if label == PSDP else f"{np.mean(gaps):+.4f} ({', '.join(f'{gap:+.4f}' for gap in gaps)})"
        sent, most = runs[0].bytes_sent[-1], reference[0].bytes_sent[-1]
        yield (
            f"| {inner} | {label} | {rates.inner:g} | {rates.shown_outer} "
            f"| {np.mean([run.loss[-1] for run in runs]):.4f} | {shown} | {sent / 1e6:,.1f} MB | {most / sent:.1f} |"
        )


def draw(path: Path, results: dict[str, dict[str, list[Run]]]) -> None:
    """Loss against tokens and against bytes, mean over seeds: a row of two pictures for each inner optimizer."""
    from gregale.timeline.plot import LINE_COLOURS, new_figure, save_figure

    figure = new_figure(path, (9.0, 0.8 + 3.2 * len(results)))
    grid = figure.subplots(len(results), 2, sharey="row", sharex="col", squeeze=False)
    for (over_tokens, over_bytes), (inner, methods) in zip(grid, results.items(), strict=True):
        for (label, runs), colour in zip(methods.items(), LINE_COLOURS, strict=False):
            loss = np.mean([run.loss for run in runs], axis=0)
            sent = runs[0].bytes_sent
            style = {"color": colour, "marker": ".", "linewidth": 1.5}
            over_tokens.plot(runs[0].tokens / 1e6, loss, label=label, **style)
            over_bytes.plot(sent[sent > 0] / 1e6, loss[sent > 0], **style)
        over_bytes.set_xscale("log")
        over_tokens.set_ylabel(f"{inner}: held-out loss, nats")
        over_tokens.set_ylim(top=min(3.2, over_tokens.get_ylim()[1]))
        for axes in (over_tokens, over_bytes):
            axes.grid(alpha=0.3)
    grid[-1][0].set_xlabel("tokens, millions")
    grid[-1][1].set_xlabel("sent over replica by a device, MB")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out loss of PSDP, DiLoCo and Streaming DiLoCo.")
    parser.add_argument("runs", type=Path, help="folder for the runs")
    parser.add_argument("--inner", nargs="+", choices=INNER, default=list(INNER), help="inner optimizers")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="beside PSDP")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help=f"of the table; {TUNING_SEED} tunes")
    parser.add_argument("--trials", action="store_true", help="other settings of the methods, too")
    parser.add_argument("--figure", type=Path, help="write the picture here (.svg or .png)")
    options = parser.parse_args()
    keep_memory()
    trials = [trial for trial in TRIALS if options.trials and trial[0] in options.methods]
    each = TUNING_RUNS + len(options.seeds) * (1 + len(options.methods)) + len(trials) * (1 + len(options.seeds))
    train = Trainer(options.runs, expected=len(options.inner) * each)
    results: dict[str, dict[str, list[Run]]] = {}
    text: list[str] = []
    for inner in options.inner:
        tuning = Tuning(train, inner, options.methods)
        chosen = tuning.chosen()
        print("\n".join(tuning.lines()), flush=True)
        found: dict[str, list[Run]] = {label: [] for label in chosen}
        for seed in options.seeds:
            for label, rates in chosen.items():
                found[label].append(train.run(inner, METHODS.get(label, PsdpConfig()), rates, seed))
        text += [tuning.trial(*trial, chosen, options.seeds) for trial in trials]
        results[inner] = found
        text += [*tuning.lines(), "", *table(inner, chosen, found), ""]
    print("\n".join(text))
    if options.figure:
        draw(options.figure, results)


if __name__ == "__main__":
    main()
