"""What `gregale plan` computes, for steps of public models on three generations of TPU: FLOPs, bounds and peaks.

    python -m benchmarks.plan_sweep [--only NAME ...]

Each row is compiled to the memory report (ten seconds of a processor). Beside peak, time and FLOPs are the ratios that
have to hold: the model's FLOPs over a count by hand, and the bounds of a search over the compiler's peak and the time
by the schedule, both at most 1. `make soak` asserts them.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from gregale.axes.layout import EXPERTS
from gregale.axes.parameters import parameter_count
from gregale.programs.plan.candidates import Bounds
from gregale.programs.plan.devices import topology_target
from gregale.programs.plan.estimates import weights_of
from gregale.programs.plan.step import MEMORY, Plan, plan_step
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.scopes import visible

GIB = 2**30
TOKENS = 257  # of a tokenizer; the models have their vocabularies
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
    "smollm-135m": {"type": "llama", **sized(30, 576, 9, 3, 1536), "vocabulary": 49152, "tied_head": True},
    "gemma1-2b": {**GEMMA, "norms": "before", **sized(18, 2048, 8, 1, 16384), "vocabulary": 256128},
    "qwen1.5-moe": {**QWEN_2, **sized(24, 2048, 16, 16, 5632), "vocabulary": 151936,
                    "experts": {"count": 60, "active": 4, "width": 1408, "shared": 5632, "shared_gate": True}},
    "mixer": {"type": "causal_mixer", "layers": 24, "hidden": 2048},
    "mistral-nemo": {**MISTRAL, **sized(40, 5120, 32, 8, 14336), "vocabulary": 131072},
}  # fmt: skip


class Row(NamedTuple):
    """A step: `rows` sequences of `length` tokens on a chip, in parts of equal size; `more`: further sections."""

    model: str
    topology: str  # of a slice
    slices: int
    rows: int
    length: int
    remat: str
    microbatches: int = 1
    more: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        place = f"{self.slices} x {self.topology}" if self.slices > 1 else self.topology
        parts = f" / {self.microbatches}" if self.microbatches > 1 else ""
        keys = "".join(f" {key}={json.dumps(value)}" for key, value in self.more)
        return f"{self.model} {place} {self.rows} x {self.length}{parts} {self.remat}{keys}"

    def config(self) -> dict[str, Any]:
        chips = math.prod(int(each) for each in self.topology.partition(":")[2].split("x"))
        found: dict[str, Any] = {
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
        for key, value in self.more:
            section, _, name = key.partition(".")
            if name:
                found[section] = {**found.get(section, {}), name: value}
            else:
                found[section] = value
        return found


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
    Row("smollm-135m", "v5e:4x4", 1, 8, 2048, "projections"),
    Row("smollm-135m", "v6e:2x4", 2, 8, 2048, "none"),
    Row("gemma1-2b", "v6e:4x4", 1, 4, 8192, "full"),
    Row("gemma2-2b", "v6e:4x4", 1, 1, 8192, "none"),
    Row("gemma2-2b", "v6e:4x4", 1, 2, 8192, "projections"),
    Row("olmo2-1b", "v5e:4x4", 1, 1, 8192, "projections"),
    Row("llama3.2-1b", "v5e:4x4", 1, 4, 8192, "offload"),
    Row("qwen1.5-moe", "v5p:2x2x4", 1, 2, 4096, "full"),
    Row(
        "qwen1.5-moe",
        "v5p:2x2x4",
        1,
        2,
        4096,
        "full",
        1,
        (("mesh", {"replica": 4, "data": 4}), ("mapping", {"compute": {"experts": "data"}})),
    ),
    Row(
        "llama3.2-3b",
        "v5e:4x4",
        1,
        2,
        4096,
        "full",
        1,
        (("start_from", "a run"), ("adapter", {"type": "lora", "rank": 16, "base": "nf4"})),
    ),
    Row("llama3.2-1b", "v5e:4x4", 1, 4, 4096, "context", 1, (("start_from", "a run"), ("objective", {"type": "dpo"}))),
    Row("qwen3-8b", "v6e:8x8", 1, 2, 8192, "context", 1, (("compute.matmul", "int8"),)),
    Row(
        "qwen3-8b",
        "v5e:4x8",
        1,
        1,
        8192,
        "context",
        1,
        (("mesh", {"stage": 4, "data": 8}), ("pipeline", {"repeats": 1, "microbatches": 4}), ("batch.size", 32)),
    ),
    Row("llama3.2-1b", "v5e:4x4", 1, 1, 32768, "context", 1, (("mesh", {"context": 4, "data": 4}), ("batch.size", 4))),
    Row("llama3.2-1b", "v5e:4x4", 2, 4, 8192, "context", 1, (("sync", {"type": "diloco"}),)),
    Row("llama3.2-1b", "v5e:4x4", 2, 4, 8192, "context", 1, (("sync", {"type": "streaming_diloco"}),)),
    Row(
        "mixer",
        "v5e:4x4",
        2,
        4,
        8192,
        "full",
        1,
        (("plugins", ["causal_mixer", "adan"]), ("optimizer", {"type": "adan"})),
    ),
    Row(
        "llama3.2-1b",
        "v6e:4x4",
        2,
        4,
        8192,
        "context",
        1,
        (("plugins", ["sign_diloco"]), ("sync", {"type": "sign_diloco"})),
    ),
]
EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"  # the plugins


def plan_of(row: Row) -> Plan:
    """Return the plan of a row's step, for which the TPU compiler is needed."""
    if str(EXAMPLES) not in sys.path:  # of this process, and of those that compile
        sys.path.append(str(EXAMPLES))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(EXAMPLES))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(row.config()))  # JSON is YAML
        config = load(TrainConfig, path, [])
    return plan_step(config, TOKENS, topology_target(row.topology, row.slices, None), MEMORY)


def by_hand(setup: Setup) -> float:
    """Return `6 N + 12 * layers * heads * head_size * keys` of a decoder for a token; see `docs/plan.md`, "FLOPs"."""
    config, model = setup.config, setup.config.model
    head, products = 0, 0.0
    for weight in weights_of(setup.base):
        active = model.experts.active / model.experts.count if model.experts and EXPERTS in weight.axis_names else 1
        tied = model.tied_head if model.head_width else True
        if weight.axes[0].name != "vocab" or tied:
            products += active * weight.size
        head += weight.size if "vocab" in weight.axis_names and (weight.axes[0].name != "vocab" or tied) else 0
    pairs, positions = 0.0, config.batch.sequence_length
    if model.head_width:
        kinds = [model.kinds[kind].window for kind in model.kind_numbers]
        pairs = 2 * model.layers * model.heads * model.HeadSize.size * visible(positions, kinds) / positions
    forward, factors = 2 * products + 2 * pairs, 0 if config.adapter is None else parameter_count(setup.model)
    if config.adapter is not None:
        return 2 * forward + 2 * pairs + 6 * factors
    if config.objective.needs_reference:
        return 4 * forward + 2 * head
    return 3 * forward


class Ratios(NamedTuple):
    """Those of a row: the model's FLOPs over the count by hand, and bounds over the compiler's figures."""

    flops: float
    memory: float
    seconds: float


def ratios(plan: Plan) -> Ratios:
    bound = Bounds(TOKENS, plan.target).of(plan.setup)
    return Ratios(
        plan.model.visible / by_hand(plan.setup),
        bound.bytes / plan.step.memory.peak,
        bound.seconds / plan.seconds(None),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS)
    options = parser.parse_args()
    print("| step | peak, GiB | fits | inside a slice, GB | FLOPs of a step and chip | FLOPs / by hand | bound / peak |"
          " bound / seconds |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for row in SWEEP:
        if options.only is None or row.model in options.only:
            plan = plan_of(row)
            found, peak, work = ratios(plan), plan.memory.peak, plan.work
            print(
                f"| {row} | {peak / GIB:.2f} | {'yes' if peak <= plan.memory_bytes else 'no'} | "
                f"{plan.link_bytes['inside slice'] / 1e9:.1f} | {work.flops:.4g} | {found.flops:.4f} | "
                f"{found.memory:.2f} | {found.seconds:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
