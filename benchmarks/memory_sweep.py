"""The closed form of memory beside the TPU compiler's, for steps of public models on one slice and two.

    python benchmarks/memory_sweep.py [--again] [--only gemma3-1b qwen3-4b]

The compiled peaks are in `src/gregale/cost/compared.json`, with the kinds and sizes of the steps: a remedy of `gregale
plan` is certain only between them. A row takes 10 to 60 seconds of a processor to compile. Without `--again`, rows that
are in the file are not compiled.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from gregale.cost.estimate import TPU, kind_of, sizes_of
from gregale.programs.plan.devices import topology_target
from gregale.programs.plan.estimates import estimate, step_shape, tree_bytes
from gregale.programs.plan.step import STEP, Request, reported, setup_for
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load

FILE = Path(__file__).parents[1] / "src/gregale/cost/compared.json"
GIB = 2**30
GEMMA = {
    "type": "gemma", "tied_head": True, "norms": "around", "activation": "gelu", "norm_offset": 1.0,
    "score_width": 256, "head_size": 256, "scaled_embedding": True, "norm_epsilon": 1e-6,
}  # fmt: skip
GEMMA_2 = {**GEMMA, "score_softcap": 50.0, "logit_softcap": 30.0, "vocabulary": 256000, "sliding_window": 4096}
GEMMA_3 = {**GEMMA, "qk_norm": True, "rotary_base": 1e6, "window_rotary_base": 1e4}
QWEN = {"type": "llama", "norm_epsilon": 1e-6, "rotary_base": 1e6}
QWEN_2 = {**QWEN, "attention_bias": True}
QWEN_3 = {**QWEN, "qk_norm": True, "head_size": 128, "vocabulary": 151936}
LLAMA = {"type": "llama", "rotary_base": 5e5, "vocabulary": 128256, "tied_head": True}
OLMO = {"type": "llama", "norms": "after", "qk_norm": True, "qk_norm_over": "heads", "rotary_base": 5e5,
        "vocabulary": 100352}  # fmt: skip
MISTRAL = {"type": "llama", "rotary_base": 1e6, "head_size": 128}


def sized(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int) -> dict[str, int]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "mlp": mlp}


def every(number: int, layers: int) -> list[int]:
    return list(range(number - 1, layers, number))


MODELS: dict[str, dict[str, Any]] = {
    "gemma2-2b": {**GEMMA_2, **sized(26, 2304, 8, 4, 9216), "full_layers": every(2, 26)},
    "gemma2-9b": {**GEMMA_2, **sized(42, 3584, 16, 8, 14336), "full_layers": every(2, 42)},
    "gemma3-1b": {**GEMMA_3, **sized(26, 1152, 4, 1, 6912), "vocabulary": 262144, "sliding_window": 512,
                  "full_layers": every(6, 26)},
    "gemma3-4b": {**GEMMA_3, **sized(34, 2560, 8, 4, 10240), "vocabulary": 262208, "sliding_window": 1024,
                  "full_layers": every(6, 34)},
    "gemma3-12b": {**GEMMA_3, **sized(48, 3840, 16, 8, 15360), "vocabulary": 262208, "sliding_window": 1024,
                   "full_layers": every(6, 48)},
    "qwen2.5-1.5b": {**QWEN_2, **sized(28, 1536, 12, 2, 8960), "vocabulary": 151936, "tied_head": True},
    "qwen2.5-3b": {**QWEN_2, **sized(36, 2048, 16, 2, 11008), "vocabulary": 151936, "tied_head": True},
    "qwen2.5-7b": {**QWEN_2, **sized(28, 3584, 28, 4, 18944), "vocabulary": 152064},
    "qwen2.5-14b": {**QWEN_2, **sized(48, 5120, 40, 8, 13824), "vocabulary": 152064},
    "qwen3-1.7b": {**QWEN_3, **sized(28, 2048, 16, 8, 6144), "tied_head": True},
    "qwen3-4b": {**QWEN_3, **sized(36, 2560, 32, 8, 9728), "tied_head": True},
    "qwen3-8b": {**QWEN_3, **sized(36, 4096, 32, 8, 12288)},
    "qwen3-14b": {**QWEN_3, **sized(40, 5120, 40, 8, 17408)},
    "llama3.2-1b": {**LLAMA, **sized(16, 2048, 32, 8, 8192)},
    "llama3.2-3b": {**LLAMA, **sized(28, 3072, 24, 8, 8192)},
    "olmo2-1b": {**OLMO, **sized(16, 2048, 16, 16, 8192)},
    "olmo2-7b": {**OLMO, **sized(32, 4096, 32, 32, 11008)},
    "mistral-7b": {**MISTRAL, **sized(32, 4096, 32, 8, 14336), "vocabulary": 32000, "sliding_window": 4096},
    "mistral-nemo": {**MISTRAL, **sized(40, 5120, 32, 8, 14336), "vocabulary": 131072},
}  # fmt: skip


class Row(NamedTuple):
    """A step: `rows` sequences of `length` tokens on a chip, in parts of equal size."""

    model: str
    topology: str  # of a slice
    slices: int
    rows: int
    length: int
    remat: str
    microbatches: int = 1

    def __str__(self) -> str:
        return (
            f"{self.model} {self.slices} x {self.topology} {self.rows} x {self.length} {self.remat} {self.microbatches}"
        )

    def config(self) -> dict[str, Any]:
        chips = math.prod(int(each) for each in self.topology.partition(":")[2].split("x"))
        return {
            "name": self.model,
            "steps": 1000,
            "mesh": {"replica": self.slices, "data": chips},
            "model": MODELS[self.model],
            "compute": {"dtype": "bfloat16", "gather": "per_layer", "remat": self.remat},
            "batch": {
                "size": self.slices * chips * self.rows,
                "sequence_length": self.length,
                "microbatches": self.microbatches,
            },
            "optimizer": {"type": "adamw", "learning_rate": 3e-4},
        }


SWEEP = [
    Row("gemma3-1b", "v6e:4x4", 1, 4, 8192, "context"),
    Row("gemma2-2b", "v6e:4x4", 1, 4, 8192, "full"),
    Row("gemma3-1b", "v5e:4x4", 2, 2, 8192, "full"),
    Row("gemma2-2b", "v5e:4x4", 2, 2, 8192, "context"),
    Row("gemma3-4b", "v6e:4x4", 1, 4, 8192, "context"),
    Row("gemma3-4b", "v5p:2x2x4", 2, 2, 8192, "full"),
    Row("gemma2-9b", "v6e:4x8", 2, 2, 8192, "full"),
    Row("gemma3-12b", "v5p:4x4x4", 1, 2, 8192, "context"),
    Row("qwen2.5-1.5b", "v5e:4x4", 1, 4, 8192, "context"),
    Row("qwen2.5-3b", "v6e:4x4", 2, 4, 8192, "full"),
    Row("qwen2.5-7b", "v6e:4x8", 1, 2, 8192, "context"),
    Row("qwen2.5-14b", "v5p:4x4x4", 2, 2, 8192, "context"),
    Row("qwen3-1.7b", "v6e:4x4", 1, 4, 8192, "full"),
    Row("qwen3-1.7b", "v5e:4x4", 2, 2, 8192, "context"),
    Row("qwen3-4b", "v6e:4x8", 1, 4, 8192, "full"),
    Row("qwen3-4b", "v5e:4x8", 2, 2, 8192, "context"),
    Row("qwen3-8b", "v6e:8x8", 1, 2, 8192, "context"),
    Row("qwen3-14b", "v5p:4x4x4", 2, 2, 8192, "full"),
    Row("llama3.2-1b", "v5e:4x4", 1, 4, 8192, "full"),
    Row("llama3.2-3b", "v6e:4x8", 2, 4, 8192, "context"),
    Row("olmo2-1b", "v5e:4x4", 1, 4, 8192, "context"),
    Row("olmo2-7b", "v6e:8x8", 2, 2, 8192, "full"),
    Row("mistral-7b", "v5e:8x8", 1, 2, 8192, "context"),
    Row("mistral-nemo", "v5p:4x4x4", 2, 2, 8192, "full"),
    *(
        Row(model, topology, slices, 4, 8192, remat, microbatches=2)
        for model, topology, slices in (
            ("gemma3-1b", "v5e:4x4", 2),
            ("gemma3-12b", "v6e:8x8", 1),
            ("llama3.2-1b", "v6e:4x4", 1),
            ("qwen2.5-14b", "v5p:4x4x4", 2),
        )
        for remat in ("context", "full")
    ),
]


def setup_of(row: Row) -> Setup:
    """Return the setup of a row's step on the topology, for which the TPU compiler is needed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(row.config()))  # JSON is YAML
        config = load(TrainConfig, path, [])
    return setup_for(config, 257, topology_target(row.topology, row.slices, None))


def compiled_peak(row: Row, setup: Setup) -> int:
    """Return the bytes of a device at the peak, by the compiler."""
    request = Request(setup.config, 257, row.topology, row.slices)
    return reported(request, STEP, tree_bytes(setup).arguments).memory.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="compile rows that are in the file, too")
    parser.add_argument("--only", nargs="+", choices=MODELS)
    options = parser.parse_args()
    kept = json.loads(FILE.read_text())
    print("| step | closed form, GiB | compiled, GiB | ratio |\n|---|---|---|---|")
    for row in SWEEP:
        if options.only and row.model not in options.only:
            continue
        setup = setup_of(row)
        if str(row) not in kept or options.again:
            step = step_shape(setup)
            kept[str(row)] = {"kind": kind_of(step), "sizes": sizes_of(step), "peak": compiled_peak(row, setup)}
            lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in kept.items())
            FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        closed, peak = estimate(setup, TPU).peak, kept[str(row)]["peak"]
        print(f"| {row} | {closed / GIB:.2f} | {peak / GIB:.2f} | {peak / closed:.2f} |", flush=True)


if __name__ == "__main__":
    main()
