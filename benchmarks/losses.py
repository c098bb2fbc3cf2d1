"""Losses of a small model under several methods, codecs, or formats of its products, paired by seed.

    python benchmarks/losses.py RUNS methods [--seeds 1 2 3]    # PSDP and DiLoCo, AdamW and Muon inside: an hour a core
    python benchmarks/losses.py RUNS codecs [--seeds 0 1 2]     # float32 and codecs: half an hour
    python benchmarks/losses.py RUNS matmul [--seeds 1 2 3]     # float32 and int8 products in the quickstart's model
    python benchmarks/losses.py RUNS matmul_10m [--seeds 1]     # and in one of 10 million parameters: 1,000 steps
    python benchmarks/losses.py RUNS experts [--seeds 1 2 3]    # MLPs and experts with the same active parameters
    python benchmarks/losses.py RUNS moments [--seeds 1 2 3]    # the state of AdamW and Muon in float32 and bfloat16
    python benchmarks/losses.py RUNS average [--seeds 1 2 3]    # the average of the parameters, and the last ones
    python benchmarks/losses.py RUNS headline_8 [--seeds 1 2 3] # OpenDiLoCo's table at this size, and more; also 2, 4
    python benchmarks/losses.py RUNS headline_gpu [--seeds 1]   # PSDP, DiLoCo and topk on one GPU, ten minutes

Each run is `gregale train config/diloco_small.yaml` with a smaller model, or another configuration: the same tokens in
the same order. The rates of `methods` are those that a search on seed 0 found (docs/diloco.md). Runs are kept in
RUNS: a second call continues. `--figure` draws the gaps of the training loss with matplotlib, and of `headline_*` the
held-out loss against the bytes that a replica sends.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gregale.codecs.codec import FeedbackConfig, ReduceConfig
from gregale.distributed.devices import keep_memory
from gregale.methods.config import OUTER, SPARSE_OUTER, DilocoConfig, PsdpConfig, StreamingDilocoConfig, SyncConfig
from gregale.optim import AdamWConfig, MuonConfig, OptimizerConfig
from gregale.optim.moments import MOMENTS
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.runs.run_directory import RunDirectory

CONFIG = Path(__file__).parent.parent / "config"
COMMON = ("--evaluation.every=null", "--checkpoint.every=100000")
LAST_STEPS = 50  # whose training loss is averaged
HEADLINE = {f"headline_{replicas}": replicas for replicas in (2, 4, 8)}
GPU = "headline_gpu"
FILES = {
    **dict.fromkeys(("methods", "codecs", "moments", "average"), "diloco_small.yaml"),
    **dict.fromkeys(("matmul", "matmul_10m", "experts"), "quickstart.yaml"),
    **dict.fromkeys((*HEADLINE, GPU), "opendiloco.yaml"),
}
SMALL = (
    "--log_every=10"
    " --steps=400 --model.layers=2 --model.hidden=64 --model.heads=4 --model.mlp=192 --batch.size=16"
    " --batch.sequence_length=64 --evaluation.batches=128"
)
SIZES = {
    "methods": "--log_every=10"
    " --steps=600 --model.layers=3 --model.hidden=48 --model.heads=2 --model.mlp=128 --batch.size=64"
    " --batch.sequence_length=32 --evaluation.batches=24",
    "codecs": SMALL,
    "moments": SMALL,
    "average": SMALL,
    **{
        name: f"--log_every=10 --mesh.replicas_per_device={replicas} --batch.size={8 * replicas}"
        for name, replicas in HEADLINE.items()
    },
    GPU: "--log_every=10 --cpu_devices=null --compute.dtype=bfloat16 --steps=1500 --model.layers=12"
    " --model.hidden=512 --model.heads=8 --model.mlp=1536 --batch.size=64 --batch.sequence_length=512"
    " --optimizer.learning_rate=1e-3",
    "matmul": "--log_every=1 --samples.prompts=[] --evaluation.bigram=false --evaluation.batches=64",
    "experts": "--log_every=10 --inspect.every=100 --samples.prompts=[] --evaluation.bigram=false"
    " --evaluation.batches=128 --steps=1200 --cpu_devices=2 --mesh.data=1 --mesh.model=1 --model.layers=2"
    " --model.hidden=64 --model.heads=2 --model.kv_heads=2 --model.mlp=192 --batch.size=16"
    " --batch.sequence_length=128 --batch.microbatches=1",
    "matmul_10m": "--log_every=1 --samples.prompts=[] --evaluation.bigram=false --evaluation.batches=128"
    " --steps=1000 --cpu_devices=1 --mesh.replica=1 --mesh.data=1 --mesh.model=1"
    " --model.layers=6 --model.hidden=384 --model.heads=6"
    " --model.kv_heads=6 --model.mlp=1024 --batch.size=2 --batch.sequence_length=64 --batch.microbatches=1"
    " --optimizer.learning_rate=1e-3",
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
    since: int = 0  # bytes count after this step


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


def of_moments() -> Iterable[Setting]:
    kinds = {
        "AdamW": AdamWConfig(learning_rate=2e-3),
        "AdamW, second decay 0.999": AdamWConfig(learning_rate=2e-3, betas=(0.9, 0.999)),
        "Muon": MuonConfig(learning_rate=5e-3),
    }
    for name, optimizer in kinds.items():
        for moments in MOMENTS:
            reference = f"{name}, float32"
            yield Setting(f"{name}, {moments}", reference, PsdpConfig(), replace(optimizer, moments=moments))


def of_average() -> Iterable[Setting]:
    methods: dict[str, SyncConfig] = {"PSDP": PsdpConfig(), "DiLoCo": DilocoConfig(period=20)}
    for name, sync in methods.items():
        for schedule in ("cosine", "constant"):
            reference, options = f"{name}, {schedule}", (f"--optimizer.schedule={{type: {schedule}, warmup: 0.1}}",)
            for more in ("", "--average={decay: 0.98, evaluate: true}"):
                label = f"{reference}, average" if more else reference
                given = (*options, more) if more else options
                yield Setting(label, reference, sync, AdamWConfig(learning_rate=2e-3), options=given)


def of_headline(replicas: int) -> Iterable[Setting]:
    optimizer, outer = AdamWConfig(learning_rate=3e-3), DilocoConfig(period=30, warmup_steps=800)
    streaming, sparse = (
        StreamingDilocoConfig(period=30, fragments=3, warmup_steps=800),
        replace(outer, outer=SPARSE_OUTER),
    )
    rows: dict[str, tuple[SyncConfig, OptimizerConfig, str]] = {
        "PSDP": (PsdpConfig(), optimizer, "none"),
        "DiLoCo": (outer, optimizer, "none"),
        "Streaming DiLoCo": (streaming, optimizer, "none"),
        "DiLoCo, int4": (outer, optimizer, "int4"),
        "DiLoCo, topk": (sparse, optimizer, "topk"),
        "DiLoCo of plain averages": (sparse, optimizer, "none"),
        "DiLoCo, Muon": (outer, MuonConfig(learning_rate=0.016), "none"),
    }
    of, reference = f"{replicas} replicas, ", f"{replicas} replicas, DiLoCo"
    alone = ("--mesh.replicas_per_device=1", "--batch.size=8")
    yield Setting("one replica", reference, PsdpConfig(), optimizer, options=alone)
    for name, (sync, inner, codec) in rows.items():
        yield Setting(of + name, reference, sync, inner, ReduceConfig(codec=codec, gather_codec=codec), since=800)


def of_gpu() -> Iterable[Setting]:
    """Eight replicas of 51 million parameters, which share the device."""
    kept = ("PSDP", "DiLoCo", "DiLoCo, topk")
    for setting in of_headline(8):
        if setting.label.removeprefix("8 replicas, ") in kept:
            sync = setting.sync if isinstance(setting.sync, PsdpConfig) else replace(setting.sync, warmup_steps=300)
            yield replace(setting, sync=sync, optimizer=AdamWConfig(learning_rate=1e-3))


def of_matmul(rate: float) -> Iterable[Setting]:
    for name, options in {"float32": (), "int8": ("--compute.matmul=int8",)}.items():
        yield Setting(name, "float32", PsdpConfig(), AdamWConfig(learning_rate=rate), options=options)


def of_experts() -> Iterable[Setting]:
    experts = tuple(f"--model.experts.{each}" for each in ("count=16", "active=2", "width=96"))
    streaming = diloco(StreamingDilocoConfig(period=30, fragments=3, warmup_steps=300), 0.2, 0.9)
    for name, sync in {"PSDP": PsdpConfig(), "streaming DiLoCo": streaming}.items():
        reference, optimizer = f"{name}, dense", AdamWConfig(learning_rate=4e-3)
        yield Setting(reference, reference, sync, optimizer)
        forms = {"bias": ("bias=true", "bias_rate=0.01"), "none": ()}
        for form in forms if name == "PSDP" else ["bias"]:
            options = (*experts, *(f"--model.experts.balance.{each}" for each in forms[form]))
            yield Setting(f"{name}, experts, balance {form}", reference, sync, optimizer, options=options)


TABLES = {
    "experts": of_experts,
    "methods": of_methods,
    "codecs": of_codecs,
    "moments": of_moments,
    "average": of_average,
    **{name: partial(of_headline, replicas) for name, replicas in HEADLINE.items()},
    GPU: of_gpu,
    "matmul": partial(of_matmul, 4e-3),
    "matmul_10m": partial(of_matmul, 1e-3),
}


class Result(NamedTuple):
    """Losses at the end of a run (held-out text, training's last steps), bytes over `replica`, losses, and speed."""

    held_out: float
    training: float
    sent: int
    by_step: dict[int, float]  # training losses
    speed: float  # median tokens a second


def final(setting: Setting, size: str, seed: int, runs: Path) -> Result:
    """Train, continue or read a run; return its result."""
    from gregale.programs.train.command import TrainOptions, main

    label = f"{size}-{setting.label}" if size.startswith("matmul") else setting.label
    name = f"{label.replace(', ', '-').replace(' ', '_').lower()}-seed{seed}"
    given = [f"--seed={seed}", f"--name={name}", *COMMON, *SIZES[size].split(), *setting.options]
    config: TrainConfig = load(TrainConfig, CONFIG / FILES[size], given)
    optimizer = replace(setting.optimizer, schedule=config.optimizer.schedule)
    config = replace(config, sync=setting.sync, reduce=setting.reduce, optimizer=optimizer, runs=str(runs))
    run = RunDirectory(runs / name)
    done = run.config.is_file() and run.read_config() == config and run.has_evaluation(config.steps)
    if not done and main(TrainOptions(), config):
        raise SystemExit("stopped; the same command continues")
    rows = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    last = {key: value for row in rows if row["step"] == config.steps for key, value in row.items()}
    by_step = {row["step"]: row["loss"] for row in rows if "loss" in row}
    speed = float(np.median([row["tokens_per_second"] for row in rows if "tokens_per_second" in row]))
    training = [loss for step, loss in by_step.items() if step > config.steps - LAST_STEPS]
    sent = last["replica_bytes"] - next((row["replica_bytes"] for row in rows if row["step"] == setting.since), 0)
    return Result(last["eval_loss"], float(np.mean(training)), sent, by_step, speed)


def table(results: dict[Setting, list[Result]]) -> Iterable[str]:
    """Markdown: loss, gaps to the reference of the same seed, and how many times fewer bytes than the most of a row."""
    by_label = {setting.label: found for setting, found in results.items()}
    most = max(found[0].sent for found in results.values())

    def gap(found: list[Result], reference: list[Result], name: str) -> str:
        gaps = [getattr(mine, name) - getattr(other, name) for mine, other in zip(found, reference, strict=True)]
        return f"{np.mean(gaps):+.4f} ({', '.join(f'{each:+.4f}' for each in gaps)})"

    yield "| run | held-out loss, nats | gap to its reference (each seed) | of training | fewer bytes | tokens/s |"
    yield "|---|---|---|---|---|---|"
    for setting, found in results.items():
        is_reference, reference = setting.label == setting.reference, by_label[setting.reference]
        gaps = ["" if is_reference else gap(found, reference, name) for name in ("held_out", "training")]
        loss = np.mean([each.held_out for each in found])
        fewer = f"{most / found[0].sent:.1f}" if found[0].sent else ""
        speed = np.mean([each.speed for each in found])
        yield f"| {setting.label} | {loss:.4f} | {' | '.join(gaps)} | {fewer} | {speed:,.0f} |"


def draw_by_bytes(results: dict[Setting, list[Result]], path: Path) -> None:
    """Draw the held-out loss of each run against the bytes that a device of a replica sent; a point for each seed."""
    figure, axes = new_figure()
    for setting, found in results.items():
        sent = [each.sent / 1e6 for each in found]
        if not all(sent):
            loss = np.mean([each.held_out for each in found])
            axes.axhline(loss, color="#808080", linewidth=0.8)
            axes.annotate(setting.label, (1, loss), xycoords=("axes fraction", "data"), ha="right", va="bottom")
            continue
        (line,) = axes.plot(sent, [each.held_out for each in found], "o", markersize=4, alpha=0.8)
        best = min(each.held_out for each in found)
        label = setting.label.partition(", ")[2]
        axes.annotate(label, (sent[0], best), (6, -3), textcoords="offset points", color=line.get_color())
    axes.set(
        xscale="log", xlabel="megabytes that a replica sends after the warm-up", ylabel="held-out loss, nats a token"
    )
    axes.margins(x=0.25, y=0.1)
    axes.grid(alpha=0.3)
    figure.savefig(path, transparent=True, metadata={"Date": None})


def new_figure():
    import matplotlib.pyplot as plt  # late, because only figures need it

    grey = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    plt.rcParams.update(dict.fromkeys(grey, "#808080"))
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    return plt.subplots(figsize=(7, 3.5), layout="constrained")


def draw(results: dict[Setting, list[Result]], seeds: list[int], path: Path) -> None:
    """Draw the gaps of the training loss to the reference of the same seed, means of `LAST_STEPS` logged steps."""
    figure, axes = new_figure()
    by_label = {setting.label: found for setting, found in results.items()}
    window = np.full(LAST_STEPS, 1 / LAST_STEPS)
    compared = [setting for setting in results if setting.label != setting.reference]
    for number, setting in enumerate(compared):
        for seed, mine, other in zip(seeds, results[setting], by_label[setting.reference], strict=True):
            gaps = [loss - other.by_step[step] for step, loss in mine.by_step.items()]
            steps, curve = list(mine.by_step)[LAST_STEPS - 1 :], np.convolve(gaps, window, "valid")
            if len(compared) == 1:
                axes.plot(steps, curve, label=f"seed {seed}")
            else:  # one colour for all seeds of a setting
                axes.plot(steps, curve, f"C{number}", label=setting.label if seed == seeds[0] else None)
    axes.axhline(0, color="#808080", linewidth=0.8)
    axes.set(xlabel="step", ylabel="gap of the training loss, nats")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder for the runs")
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--figure", type=Path, help="an SVG of the gaps")
    options = parser.parse_args()
    keep_memory()
    settings = list(TABLES[options.table]())
    found: dict[Setting, list[Result]] = {}
    for each in settings:
        found[each] = [final(each, options.table, seed, options.runs) for seed in options.seeds]
        print(f"{each.label}: held-out loss {np.mean([one.held_out for one in found[each]]):.4f}", flush=True)
    print("\n".join(table(found)))
    if options.figure and options.table in HEADLINE:
        draw_by_bytes(found, options.figure)
    elif options.figure:
        draw(found, options.seeds, options.figure)


if __name__ == "__main__":
    main()
