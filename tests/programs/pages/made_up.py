"""Folders of runs as training would have left them, made up in no time."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gregale.atomic_files import write_bytes
from tests.runs.runs import write_run as write_run_files

CONFIG: dict[str, Any] = {
    "name": "made-up",
    "steps": 400,
    "model": {"type": "llama", "layers": 4, "hidden": 64},
    "optimizer": {"type": "adamw", "learning_rate": 0.003},
    "sync": {"type": "psdp"},
}
STREAMING = {"type": "streaming_diloco", "period": 40, "fragments": 3, "delay": 2, "pattern": "strided"}


def write_run(folder: Path, steps: int = 400, seed: int = 0, **more: Any) -> Path:
    """A run's folder; `more` are further keys of its configuration, `sync` and the like."""
    write_run_files(folder, 0, **CONFIG | {"name": folder.name, "steps": max(steps, 1)} | more)
    write_metrics(folder, figures(steps, seed))
    (folder / "samples.txt").write_text("--- step 200\nearly text\n--- step 400\nlate text\n", encoding="utf-8")
    return folder


def write_metrics(folder: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Replace the metrics at once: a page that is served meanwhile never finds an empty file."""
    write_bytes(folder / "metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines).encode())


def figures(steps: int, seed: int) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    noise = np.random.default_rng(seed).normal(0, 0.05, steps)
    lines = []
    for step in range(1, steps + 1):
        loss = 2 + 4 * math.exp(-step / steps * (5 + seed)) + noise[step - 1]
        lines.append(
            {
                "step": step,
                "loss": loss,
                "grad_norm": 1 + abs(noise[step - 1]) * 10,
                "learning_rate": 0.003 * (1 - step / steps / 2),
                "tokens": step * 2048 * (1 + seed),
                "tokens_per_second": 9000.0 + 100 * seed,
                "step_seconds": 0.2275,
                "elapsed_seconds": 0.25 * step,
                "host_memory_bytes": 900_000_000 + step,
                "replica_bytes": step // 20 * 1_000_000,
                "healing_seconds": 0.0,
            }
        )
        if step % max(1, steps // 8) == 0:
            lines.append({"step": step, "eval_loss": loss + 0.05, "bits_per_byte": loss * 1.44})
    return lines


def write_rounds(folder: Path, names: list[str], late: float) -> None:
    """rounds.jsonl of an island: every second round it waits, and it healed in the first."""
    began, lines = 1_795_357_252.0 + late, []
    for number in range(1, 41):
        seconds = 1.5 + late
        line = {"round": number, "generation": 1, "members": names, "weight": 4096.0, "began": began}
        line |= {"ended": began + seconds, "seconds": seconds, "waiting_seconds": 0.4 if number % 2 else 0.0}
        line |= {"bytes_sent": 43_588, "bytes_received": 43_588, "healed": number == 1}
        lines.append(line)
        began += 4
    (folder / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
