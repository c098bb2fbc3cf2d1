"""The rows of `benchmarks/gpu.py` in plain PyTorch: the model of `torch_step.py` on one GPU, a process a row.

    python benchmarks/torch_gpu.py --worker CASE --steps 10 --platform gpu

Float32 weights, bfloat16 by autocast, AdamW (fused) after clipping; prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch_step import Model, angles

WARM_UP_STEPS = 2


def weights(shape: dict, device: str) -> dict[str, torch.Tensor]:
    """Normal weights of standard deviation 0.02 as `torch_step.Model` takes them, [layers, ...]."""
    layers, hidden, heads, mlp = (shape[size] for size in ("layers", "hidden", "heads", "mlp"))

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device) * 0.02

    by_head = (layers, hidden, heads, hidden // heads)
    return {
        "embedding": normal(shape["vocabulary"], hidden),
        "attention_norm": torch.ones(layers, hidden, device=device),
        **{name: normal(*by_head) for name in ("query", "key", "value")},
        "out": normal(layers, hidden, hidden),
        "mlp_norm": torch.ones(layers, hidden, device=device),
        **{name: normal(layers, hidden, mlp) for name in ("gate", "up")},
        "down": normal(layers, mlp, hidden),
        "norm": torch.ones(hidden, device=device),
        **({} if shape["tied_head"] else {"head": normal(hidden, shape["vocabulary"])}),
    }


def measured(case: dict, steps: int, device: str) -> dict:
    shape, (way,) = case["shape"], case["how"]
    torch.manual_seed(0)
    model = Model(weights(shape, device)).to(device)
    loss_of = torch.compile(model) if way == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    ids = torch.randint(shape["vocabulary"], (shape["rows"], shape["length"] + 1), device=device)
    turned = (table.to(device) for table in angles(shape["length"], shape["hidden"] // shape["heads"]))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), *turned

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_of(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()  # waits for the loss alone

    def timed() -> tuple[float, float]:
        began = time.perf_counter()
        loss = step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began, loss

    compile_s, _ = timed()
    found = [timed() for _ in range(WARM_UP_STEPS - 1 + steps)]
    times = [seconds for seconds, _ in found[WARM_UP_STEPS - 1 :]]
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "median_s": statistics.median(times),
        "slowest_s": max(times),
        "compile_s": compile_s,  # the whole first step
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "loss": found[-1][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--platform", required=True)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = "cuda" if arguments.platform == "gpu" else "cpu"
    print(json.dumps(measured(json.loads(arguments.worker), arguments.steps, device)))


if __name__ == "__main__":
    main()
