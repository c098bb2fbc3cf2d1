"""Training runs for benchmarks: `gregale train` in this process, and what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

from gregale.services.config import TrainConfig


def rows_of(config: TrainConfig) -> dict[int, dict]:
    """Trains (or goes on with, or reads) a run; what metrics.jsonl says of each step.

    Raises `SystemExit` if the run was interrupted.
    """
    from gregale.programs.train.command import TrainOptions, main

    folder = Path(config.runs) / config.name
    print(f"--- {folder}", flush=True)
    if main(TrainOptions(), config):
        raise SystemExit("stopped; the same command goes on from there")
    rows: dict[int, dict] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    return rows
