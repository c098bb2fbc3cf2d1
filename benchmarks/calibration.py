"""Gregale's clock beside published measurements of TPUs: the ratios, and the factors that `plan` uses.

    python benchmarks/calibration.py [--rows rows.json --compile 32b-v5e]

A row is the step of a published run, as far as Gregale can express it: the same model, chips, and tokens a chip and
step, parameters split over all chips, and the rematerialisation that is nearest to the published one. Published figures
are FLOP/s a chip by the publisher's own count, `6 N + 12 x layers x heads x head_size x positions` a token, with all
parameters in `N`; of a mixture, tokens a second. A factor is the geometric mean of the ratios of seconds, published
over estimated: one of all dense models, one of all mixtures of experts.

With `--compile` the seconds are those of the compiled program, which takes five to fifteen minutes of a processor a
row; its report is kept in `--rows`. A mixture needs it. Otherwise they are of the roofline and of the compiled example
of the same chip:

- products at the peak, times the example's compute cycles over its products at the peak
- attention by JAX's splash kernels, which the published runs had, by their bundles
- seconds of the links by the bytes of the memory report's program, times the share that the example exposes
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gregale.cost.chips import CHIPS
from gregale.cost.collectives import INSIDE
from gregale.programs.plan.command import tokens_of
from gregale.programs.plan.devices import topology_target
from gregale.programs.plan.step import MEMORY, plan_step
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.scopes import visible

LLAMA_3_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "vocabulary": 128256}
LLAMA_3_70B = {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672, "vocabulary": 128256}
LLAMA_2_70B = {**LLAMA_3_70B, "vocabulary": 32000}
WIDE = {"heads": 64, "kv_heads": 64, "head_size": 128, "mlp": 28672, "vocabulary": 32000}
EXPERTS = {"count": 8, "active": 2}
MIXTRAL = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "vocabulary": 32000,
           "experts": {**EXPERTS, "width": 14336}}  # fmt: skip
LARGE_MIXTRAL = {"layers": 56, "hidden": 6144, "heads": 48, "kv_heads": 8, "vocabulary": 32768,
                 "experts": {**EXPERTS, "width": 16384}}  # fmt: skip
MAXTEXT = "MaxText, README, configs/"
RECIPES = "AI-Hypercomputer/tpu-recipes, training/trillium/"


@dataclass(frozen=True)
class Published:
    """A published measurement.

    - `model`: keys of Gregale's model
    - `rows`, `length`: sequences of a chip and step, and their tokens
    - `remat`: Gregale's policy nearest to the published one
    - `teraflops`: of a chip and second, by the publisher's count
    - `tokens`: of a chip and second; 0: by `teraflops`
    """

    name: str
    model: dict[str, Any]
    topology: str
    rows: int
    length: int
    remat: str
    teraflops: float
    source: str
    tokens: float = 0

    @property
    def chips(self) -> int:
        return math.prod(map(int, self.topology.partition(":")[2].split("x")))

    @property
    def seconds(self) -> float:
        """Return the published time of a step."""
        if self.tokens:
            return self.rows * self.length / self.tokens
        m = self.model
        inner = m.get("head_size", m["hidden"] // m["heads"]) * m["heads"]
        layer = m["hidden"] * (2 * inner + 2 * inner * m["kv_heads"] // m["heads"] + 3 * m["mlp"])
        weights = m["layers"] * layer + (1 if self.name.startswith("Llama 3") else 2) * m["hidden"] * m["vocabulary"]
        return self.rows * self.length * (6 * weights + 12 * m["layers"] * inner * self.length) / self.teraflops / 1e12


ROWS = {
    "16b-v5e": Published("16B", {"layers": 32, "hidden": 4096, **WIDE}, "v5e:16x16", 6, 2048, "full", 120.4,
                         MAXTEXT + "v5e/16b.sh"),
    "32b-v5e": Published("32B", {"layers": 32, "hidden": 8192, **WIDE}, "v5e:16x16", 4, 2048, "full", 131.7,
                         MAXTEXT + "v5e/32b.sh"),
    "64b-v5e": Published("64B", {"layers": 64, "hidden": 8192, **WIDE}, "v5e:16x16", 2, 2048, "full", 118.0,
                         MAXTEXT + "v5e/64b.sh"),
    "8b-v5e": Published("Llama 3 8B", LLAMA_3_8B, "v5e:16x16", 4, 4096, "full", 0.61 * 197,
                        "Levanter, W&B report of marin-community/marin issue 620 (not checked)"),
    "32b-v5p": Published("32B", {"layers": 32, "hidden": 8192, **WIDE}, "v5p:4x4x4", 7, 2048, "projections", 328.0,
                         MAXTEXT + "v5p/32b.sh"),
    "64b-v5p": Published("64B", {"layers": 64, "hidden": 8192, **WIDE}, "v5p:4x4x4", 3, 2048, "projections", 323.0,
                         MAXTEXT + "v5p/64b.sh"),
    "8b-v6e": Published("Llama 3.1 8B", LLAMA_3_8B, "v6e:16x16", 4, 8192, "context", 417.4,
                        RECIPES + "Llama3.1-8B-MaxText/v6e-256"),
    "70b-v6e": Published("Llama 3.1 70B", LLAMA_3_70B, "v6e:16x16", 5, 8192, "offload", 462.3,
                         RECIPES + "Llama3.1-70B-MaxText/v6e-256"),
    "2-70b-v6e": Published("Llama 2 70B", LLAMA_2_70B, "v6e:16x16", 2, 4096, "full", 402.3,
                           RECIPES + "Llama2-70B-MaxText"),
    "2-70b-v5p": Published("Llama 2 70B", LLAMA_2_70B, "v5p:4x8x8", 4, 4096, "context", 300.2,
                           "MaxText, optimized models tiering, configs/v5p/llama2_70b.sh"),
    "8x7b-v5p": Published("Mixtral 8x7B", MIXTRAL, "v5p:4x4x4", 36, 4096, "full", 241.3,
                          "MaxText, optimized models tiering", tokens=2909),
    "8x7b-v6e": Published("Mixtral 8x7B", MIXTRAL, "v6e:16x16", 8, 4096, "offload", 323.2,
                          RECIPES + "Mixtral-8x7B-MaxText", tokens=3896.8),
    "8x22b-v6e": Published("Mixtral 8x22B", LARGE_MIXTRAL, "v6e:16x16", 8, 4096, "offload", 332.3,
                           "MaxText, optimized models tiering", tokens=1326),
}  # fmt: skip


def config(row: Published) -> dict[str, Any]:
    return {
        "name": row.name,
        "steps": 1000,
        "mesh": {"data": row.chips},
        "model": {"type": "llama", **row.model},
        "compute": {"dtype": "bfloat16", "gather": "per_layer", "remat": row.remat},
        "data": {
            "sources": {"text": {"type": "text", "files": ["*.txt"]}},
            "tokenizer": {"type": "file", "path": "tokenizer.json", "end_of_document": "<|end_of_text|>"},
        },
        "batch": {"size": row.chips * row.rows, "sequence_length": row.length, "microbatches": 1},
        "optimizer": {"type": "adamw", "learning_rate": 3e-4},
    }


# Of config/llama_8b_two_slices.yaml on two slices, with JAX's splash kernels: seconds of compute, and of waiting inside
# a slice.
EXAMPLE = Path(__file__).parents[1] / "config/llama_8b_two_slices.yaml"
COMPILED = {"v5e": ("v5e:8x8", 5.454, 0.188), "v6e": ("v6e:8x8", 1.65, 0.045), "v5p": ("v5p:4x4x4", 2.30, 0.014)}


@dataclass(frozen=True)
class Splash:
    """JAX's splash kernel, with which the published runs and the compiled example ran.

    - `queries`, `keys`: tokens of a block
    - `step`, `row`, `block`: cycles of a step of the grid, a row of blocks and a visible block, by the bundles
    """

    queries: int
    keys: int
    step: int
    row: int
    block: int

    def cycles(self, length: int) -> int:
        """Return the cycles of one head."""
        rows, columns = length // self.queries, length // self.keys
        visible = sum(-(-(row + 1) * self.queries // self.keys) for row in range(rows))
        outer = columns if self.keys > self.queries else rows
        return rows * columns * self.step + outer * self.row + visible * self.block


# By chip and length: forward, and the fused backward pass.
SPLASH = {
    ("v5e", 2048): (Splash(1024, 1024, 144, 1377, 4512), Splash(1024, 1024, 356, 780, 10240)),
    ("v5e", 4096): (Splash(1024, 1024, 144, 1377, 4512), Splash(1024, 2048, 588, 1420, 20480)),
    ("v5e", 8192): (Splash(1024, 1024, 296, 1377, 4512), Splash(1024, 2048, 588, 1420, 20480)),
    ("v5p", 2048): (Splash(1024, 1024, 105, 690, 2319), Splash(1024, 1024, 290, 390, 5120)),
    ("v5p", 4096): (Splash(1024, 1024, 105, 690, 2319), Splash(1024, 2048, 348, 710, 10240)),
    ("v5p", 8192): (Splash(1024, 1024, 196, 690, 2319), Splash(1024, 2048, 348, 710, 10240)),
    ("v6e", 4096): (Splash(1024, 1024, 164, 702, 3433), Splash(1024, 2048, 299, 732, 11899)),
    ("v6e", 8192): (Splash(2048, 2048, 203, 1309, 13832), Splash(2048, 2048, 585, 796, 23374)),
}


@dataclass(frozen=True)
class Parts:
    """Seconds of a step by its roofline: products at the peak without attention, kernels, and links inside a slice."""

    products: float
    kernels: float
    links: float


def parts_of(path: Path, topology: str, slices: int) -> Parts:
    target = topology_target(topology, slices, None)
    config = load(TrainConfig, path, [])
    plan = plan_step(config, tokens_of(config), target, MEMORY)
    model, positions, bound = config.model, config.batch.sequence_length, plan.roofline(None)
    rows = config.batch.size // plan.setup.layout.mesh.size
    passes = 2 if config.compute.remat == "full" else 1  # of the forward pass of attention
    forward, backward = (
        each.cycles(positions) / target.chip.cycles_per_second for each in SPLASH[target.chip.name, positions]
    )
    attention = rows * model.heads * (passes * forward + backward)
    pairs = 2 * 2 * model.layers * model.heads * model.HeadSize.size * visible(positions, (None,)) * rows
    products = bound.compute - (passes + 2.5) * pairs / (target.chip.flops_per_second / target.devices_a_chip)
    return Parts(products, model.layers * attention, bound.links[INSIDE])


def estimated(row: Published) -> float:
    """Return the seconds of a step by its roofline and the compiled example of the chip."""
    topology, compute, waiting = COMPILED[row.topology.partition(":")[0]]
    example = parts_of(EXAMPLE, topology, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(config(row)))  # JSON is YAML
        found = parts_of(path, row.topology, 1)
    return found.products * compute / example.products + found.kernels + found.links * waiting / example.links


def planned(row: Published) -> dict[str, Any]:
    """Return parts of the report of `gregale plan --json`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(config(row)))  # JSON is YAML
        command = [sys.executable, "-m", "gregale", "plan", str(path), "--topology", row.topology, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=folder, check=True)
    report = json.loads(done.stdout)
    return {key: report[key] for key in ("estimate", "memory", "roofline", "overlap", "fits", "notes")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="where reports of compiled programs are kept, as JSON")
    parser.add_argument("--compile", nargs="+", default=[], choices=ROWS)
    options = parser.parse_args()
    kept = json.loads(options.rows.read_text()) if options.rows and options.rows.exists() else {}
    for key in options.compile:
        if key not in kept:
            kept[key] = planned(ROWS[key])
            options.rows.write_text(json.dumps(kept, indent=1))
    mixtures = {key for key, row in ROWS.items() if "experts" in row.model}
    clock = {key: kept[key]["estimate"]["seconds"] for key in ROWS if key in kept}
    clock |= {key: estimated(row) for key, row in ROWS.items() if key not in kept.keys() | mixtures}
    factors = {}
    for name, keys in (("dense models", clock.keys() - mixtures), ("mixtures", clock.keys() & mixtures)):
        ratios = [ROWS[key].seconds / clock[key] for key in keys]
        if ratios:
            factors |= dict.fromkeys(keys, factor := math.exp(sum(map(math.log, ratios)) / len(ratios)))
            print(f"Factor of {name}: {factor:.3f}, of a row {min(ratios):.2f} to {max(ratios):.2f}")
    print("\n| model | chips | tokens a chip | utilisation, published | at most | ratio | calibrated | off | source |")
    print("|---|---|---|---|---|---|---|---|---|")
    for key, seconds in clock.items():
        row, ratio, factor = ROWS[key], ROWS[key].seconds / seconds, factors[key]
        share = row.teraflops * 1e12 / CHIPS[row.topology.partition(":")[0]].flops_per_second
        figures = f"{share:.1%} | {share * ratio:.1%} | {ratio:.2f} | {share * ratio / factor:.1%}"
        figures += f" | {ratio / factor - 1:+.0%}"
        print(f"| {row.name} | {row.topology} | {row.rows} x {row.length:,} | {figures} | {row.source} |")


if __name__ == "__main__":
    main()
