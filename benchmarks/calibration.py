"""Gregale's clock beside published measurements of TPUs: the ratios, and the one factor that `plan` uses.

    python benchmarks/calibration.py --rows rows.json [--only 8b-v6e 16b-v5e]

A row compiles the step of the published run, as far as Gregale can express it: the same model, chips, and tokens a chip
and step, parameters split over all chips, and the rematerialisation that is nearest to the published one. That takes
three to ten minutes of a processor a row. Reports are kept in `--rows`. Published figures are FLOP/s a chip by the
publisher's own count, which is `6 N + 12 x layers x heads x head_size x positions` a token, with all parameters in `N`.
The factor is the geometric mean of the ratios of seconds, published over estimated, over all rows.
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

LLAMA_3_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "vocabulary": 128256}
LLAMA_3_70B = {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672, "vocabulary": 128256}
LLAMA_2_70B = {**LLAMA_3_70B, "vocabulary": 32000}
WIDE = {"heads": 64, "kv_heads": 64, "head_size": 128, "mlp": 28672, "vocabulary": 32000}
MAXTEXT = "MaxText, README, configs/"
RECIPES = "AI-Hypercomputer/tpu-recipes, training/trillium/"


@dataclass(frozen=True)
class Published:
    """A published measurement.

    - `model`: keys of Gregale's model
    - `rows`, `length`: sequences of a chip and step, and their tokens
    - `remat`: Gregale's policy nearest to the published one
    - `teraflops`: of a chip and second, by the publisher's count
    """

    name: str
    model: dict[str, int]
    topology: str
    rows: int
    length: int
    remat: str
    teraflops: float
    source: str

    @property
    def chips(self) -> int:
        return math.prod(map(int, self.topology.partition(":")[2].split("x")))

    @property
    def seconds(self) -> float:
        """Return the published time of a step."""
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
                        "Levanter, W&B report of marin-community/marin issue 620"),
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
    parser.add_argument("--rows", type=Path, required=True, help="where reports are kept, as JSON")
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=ROWS)
    options = parser.parse_args()
    kept = json.loads(options.rows.read_text()) if options.rows.exists() else {}
    for key in options.only:
        if key not in kept:
            kept[key] = planned(ROWS[key])
            options.rows.write_text(json.dumps(kept, indent=1))
    ratios = {
        key: ROWS[key].seconds / found["estimate"]["seconds"]
        for key, found in kept.items()
        if key in ROWS and found["estimate"] is not None
    }
    factor = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    print(f"Factor: {factor:.3f}\n")
    print("| model | chips | tokens a chip | published s | at least s | ratio | calibrated s | off | source |")
    print("|---|---|---|---|---|---|---|---|---|")
    for key, ratio in ratios.items():
        row, seconds = ROWS[key], kept[key]["estimate"]["seconds"]
        figures = (
            f"{row.seconds:.2f} | {seconds:.2f} | {ratio:.2f} | {factor * seconds:.2f} | {factor / ratio - 1:+.0%}"
        )
        print(f"| {row.name} | {row.topology} | {row.rows} x {row.length:,} | {figures} | {row.source} |")


if __name__ == "__main__":
    main()
