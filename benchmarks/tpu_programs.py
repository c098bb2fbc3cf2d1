"""What the TPU compiler makes of Llamas of four sizes, on a machine without a TPU: one `gregale plan --json` a row.

    python benchmarks/tpu_programs.py --rows rows.json [--sizes 8b] [--lengths 8192] [-- --until code]

Two sequences a chip and step, one at a time. What follows `--` goes to `gregale plan`. A row takes ten to sixty seconds
of a processor until its memory is known. Reports are kept in `--rows` by model, topology and options.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SIZES = {
    "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "mlp": 8192, "tied_head": True},
    "3b": {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "mlp": 8192, "tied_head": True},
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336},
    "70b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672},
}
TOPOLOGIES = {  # of one slice
    "v5e": {"1b": "4x4", "3b": "4x8", "8b": "8x8", "70b": "16x16"},
    "v6e": {"1b": "4x4", "3b": "4x8", "8b": "8x8", "70b": "16x16"},
    "v5p": {"1b": "2x2x4", "3b": "2x4x4", "8b": "4x4x4", "70b": "4x8x8"},
}
MICROBATCHES = 2
GIB = 2**30


def config(size: str, chips: int, slices: int, length: int) -> dict[str, Any]:
    return {
        "name": f"llama-{size}",
        "steps": 1000,
        "mesh": {"replica": slices, "data": chips},
        "model": {"type": "llama", "vocabulary": 128256, "rotary_base": 500000, **SIZES[size]},
        "compute": {"dtype": "bfloat16", "gather": "per_layer"},
        "data": {
            "sources": {"text": {"type": "text", "files": ["*.txt"]}},
            "tokenizer": {"type": "file", "path": "tokenizer.json", "end_of_document": "<|end_of_text|>"},
        },
        "batch": {"size": slices * chips * MICROBATCHES, "sequence_length": length, "microbatches": MICROBATCHES},
        "optimizer": {"type": "adamw", "learning_rate": 3e-4},
    }


def planned(size: str, chip: str, slices: int, length: int, options: list[str]) -> dict[str, Any]:
    """Return the report of `gregale plan --json`."""
    shape = TOPOLOGIES[chip][size]
    chips = math.prod(int(each) for each in shape.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(config(size, chips, slices, length)))  # JSON is YAML
        command = [sys.executable, "-m", "gregale", "plan", str(path), "--topology", f"{chip}:{shape}", "--json"]
        command += ["--slices", str(slices), *(options or ["--until", "memory"])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=folder, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="where reports are kept, as JSON")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--chips", nargs="+", default=list(TOPOLOGIES), choices=TOPOLOGIES)
    parser.add_argument("--slices", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 32768])
    parser.add_argument("plan", nargs="*", help="options of gregale plan, after --")
    options = parser.parse_args()
    rows = json.loads(options.rows.read_text()) if options.rows.exists() else {}
    print("| row | peak GiB | fits | s, overlapped | s, of the compiler's estimate |\n|---|---|---|---|---|")
    for row in itertools.product(options.sizes, options.chips, options.slices, options.lengths):
        key = " ".join(str(each) for each in (*row, *options.plan))
        if key not in rows:
            rows[key] = planned(*row, options.plan)
            options.rows.write_text(json.dumps(rows, indent=1))
        found = rows[key]
        seconds = "" if found["estimate"] is None else f"{found['estimate']['seconds']:.2f}"
        bound = found["roofline"]["step_seconds_overlapped"]
        peak = found["memory"]["peak"] / GIB
        print(f"| {key} | {peak:.1f} | {found['fits']} | {bound:.2f} | {seconds} |", flush=True)


if __name__ == "__main__":
    main()
