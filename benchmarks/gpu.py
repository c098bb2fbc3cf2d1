"""Gregale's training step on one GPU: tokens a second, utilisation and memory, beside `torch.compile`.

    python benchmarks/gpu.py [--torch PYTHON] [--models 124m 1b] [--steps 10] [--json FILE]

Each row has a process of its own with a limit of time, so that one that does not fit or fails is a row that says so;
rows for which no time is left (`--budget`) say that. A row compiles its step, runs it twice to warm up, and then
`--steps` times; the time is the median. With `--torch`, a Python that has PyTorch for CUDA, `torch_gpu.py` runs the
same model there: float32 weights, bfloat16 by autocast, `scaled_dot_product_attention`, fused AdamW.

    python benchmarks/gpu.py --platform cpu --small --torch PYTHON   # the same rows, tiny, where there is no GPU
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gregale.axes.layout import MeshConfig, make_mesh
from gregale.cost.chips import CHIPS
from gregale.distributed.devices import start_devices
from gregale.model.config import ComputeConfig
from gregale.model.llama import LlamaConfig
from gregale.optim import AdamWConfig, ConstantSchedule
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.model_flops import model_flops
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import BatchConfig, DistributedConfig, TrainConfig

WARM_UP_STEPS = 2
GREGALE = "gregale"
SIZES = ("layers", "hidden", "heads", "mlp", "vocabulary")
SHOWN_ERROR = 160  # characters of it in the table


@dataclass(frozen=True)
class Shape:
    """A Llama with as many heads of keys as of queries, and a batch of it."""

    name: str
    layers: int
    hidden: int
    heads: int
    mlp: int
    vocabulary: int
    tied_head: bool
    rows: int
    length: int


@dataclass(frozen=True)
class Case:
    """A row of the table.

    - `how`: attention and remat of Gregale's; of torch's `eager` or `compile`
    - `packed`: each row of tokens holds two documents
    """

    shape: Shape
    side: str
    how: tuple[str, ...]
    packed: bool = False

    @property
    def label(self) -> str:
        return " ".join((self.side, *self.how, *(["two documents"] if self.packed else [])))


SHAPES = {
    "124m": Shape("124m", 12, 768, 12, 2048, 50304, tied_head=True, rows=16, length=1024),
    "1b": Shape("1b", 16, 2048, 16, 5632, 50304, tied_head=False, rows=8, length=2048),
}
SMALL = {"layers": 2, "hidden": 64, "heads": 2, "mlp": 128, "vocabulary": 256, "rows": 2, "length": 64}
# What fits 80 GB and is sensible for the size: everything saved, attention alone, projections, nothing.
HOW = {
    "124m": (("cudnn", "none"), ("cudnn", "context"), ("xla", "projections")),
    "1b": (("cudnn", "projections"), ("cudnn", "context"), ("xla", "full")),
}
TORCH = ("eager", "compile")


def cases(models: list[str], changes: dict[str, int], torch: bool) -> Iterator[Case]:
    for name in models:
        shape = replace(SHAPES[name], **changes)
        for number, how in enumerate(HOW[name]):
            yield Case(shape, GREGALE, how)
            if number == 0:
                yield Case(shape, GREGALE, how, packed=True)
        if torch:
            yield from (Case(shape, "torch", (way,)) for way in TORCH)


def setup_of(case: Case) -> Setup:
    shape, (attention, remat) = case.shape, case.how
    config = TrainConfig(
        name=shape.name,
        steps=1000,
        mesh=MeshConfig(data=1),
        model=LlamaConfig(**{size: getattr(shape, size) for size in SIZES}, tied_head=shape.tied_head),
        compute=ComputeConfig(dtype="bfloat16", attention=attention, remat=remat, loss_block=4096),
        batch=BatchConfig(size=shape.rows, sequence_length=shape.length, microbatches=1),
        optimizer=AdamWConfig(learning_rate=1e-4, schedule=ConstantSchedule(), decay="all", clip_norm=1.0),
    )
    return set_up(config, shape.vocabulary, make_mesh(config.mesh, jax.devices()[:1]))


def batch_of(setup: Setup, packed: bool) -> dict[str, Any]:
    """Random tokens, laid out as `train` does it; documents' numbers only where there are several."""
    shapes = setup.abstract_batch
    ids = np.random.default_rng(0).integers(0, setup.Vocab.size, np.add(shapes["tokens"].array.shape, (0, 1)))
    places = np.broadcast_to(np.arange(ids.shape[1] - 1), ids[:, 1:].shape)
    arrays = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "positions": places,
        "loss_mask": np.ones(places.shape),
        **({"segment_ids": places * 2 // places.shape[1]} if packed else {}),
    }
    return {
        name: jax.tree.map(
            lambda leaf, array=array: jax.device_put(array.astype(leaf.dtype), leaf.sharding), shapes[name]
        )
        for name, array in arrays.items()
    }


def measured(case: Case, steps: int) -> dict[str, Any]:
    """A row of Gregale's, in this process."""
    setup = setup_of(case)
    state, batch = setup.initial_state(), batch_of(setup, case.packed)
    began = time.perf_counter()
    step = setup.stepper().program.lower(state, batch).compile()
    compile_s = time.perf_counter() - began
    times = []
    for _ in range(WARM_UP_STEPS + steps):
        began = time.perf_counter()
        state, report = jax.block_until_ready(step(state, batch))
        times.append(time.perf_counter() - began)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "device": jax.devices()[0].device_kind,
        "median_s": statistics.median(times[WARM_UP_STEPS:]),
        "slowest_s": max(times[WARM_UP_STEPS:]),
        "compile_s": compile_s,
        "peak_bytes": stats.get("peak_bytes_in_use", step.memory_analysis().peak_memory_in_bytes),
        "loss": float(jnp.ravel(report.metrics.loss)[0]),
        "flops_per_token": model_flops(setup).full,
    }


def measured_apart(case: Case, arguments: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """A row, in a process of its own; `error` where it has no figures."""
    row = {"model": case.shape.name, "step": case.label, "tokens": case.shape.rows * case.shape.length}
    if limit_s <= 0:
        return {**row, "error": "not run: --budget is spent"}
    here = Path(__file__).resolve()
    python, script = (
        (sys.executable, here) if case.side == GREGALE else (arguments.torch, here.with_name("torch_gpu.py"))
    )
    command = [python, str(script), "--worker", json.dumps(asdict(case)), "--steps", str(arguments.steps)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu" if arguments.platform == "cpu" else "cuda"}
    command += ["--platform", arguments.platform]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {**row, "error": f"not done after {limit_s:.0f} s"}
    if done.returncode:
        return {**row, "error": reason(done.stderr) or f"exit code {done.returncode}"}
    return {**row, **json.loads(done.stdout.splitlines()[-1])}


def reason(errors: str) -> str:
    """The last line of a traceback that names an exception."""
    named = [line for line in errors.splitlines() if line and not line[0].isspace() and "Error" in line.split(":")[0]]
    return named[-1] if named else " ".join(errors.splitlines()[-1:])


def with_rates(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With tokens a second, and the share of the chip's peak that the model's own FLOPs are; torch's are Gregale's."""
    per_token = {row["model"]: row["flops_per_token"] for row in rows if "flops_per_token" in row}
    for row in rows:
        if "median_s" not in row:
            continue
        row["tokens_per_s"] = row["tokens"] / row["median_s"]
        peak = next((chip.flops_per_second for name, chip in CHIPS.items() if f" {name}" in f" {row['device']}"), None)
        if peak is not None and row["model"] in per_token:
            row["utilisation"] = row["tokens_per_s"] * per_token[row["model"]] / peak
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [
        "| model | step | tokens/s | utilisation | median s | slowest s | compile s | peak GiB | last loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['model']} | {row['step']} | {row['error'][:SHOWN_ERROR]} | | | | | | |")
            continue
        share = f"{row['utilisation']:.1%}" if "utilisation" in row else "-"
        lines.append(
            f"| {row['model']} | {row['step']} | {row['tokens_per_s']:,.0f} | {share} | {row['median_s']:.4f} | "
            f"{row['slowest_s']:.4f} | {row['compile_s']:.1f} | {row['peak_bytes'] / 2**30:.2f} | {row['loss']:.3f} |"
        )
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a row")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python with PyTorch: also rows of torch's")
    parser.add_argument("--platform", default="gpu", choices=["gpu", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a row may take")
    parser.add_argument("--budget", type=float, default=570, help="seconds that all rows may take")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    if arguments.worker:
        given = json.loads(arguments.worker)
        case = Case(Shape(**given["shape"]), given["side"], tuple(given["how"]), given["packed"])
        start_devices(None, DistributedConfig())
        print(json.dumps(measured(case, arguments.steps)))
        return
    end, rows = time.monotonic() + arguments.budget, []
    for case in cases(arguments.models, SMALL if arguments.small else {}, bool(arguments.torch)):
        row = measured_apart(case, arguments, min(arguments.limit, end - time.monotonic()))
        rows.append(row)
        print(
            f"{row['model']} {row['step']}: {row.get('error') or format(row['median_s'], '.4f') + ' s'}",
            file=sys.stderr,
        )
    print(table(with_rates(rows)))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
