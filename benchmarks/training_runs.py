"""Training runs for benchmarks: `gregale train` in this process, and what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

from gregale.services.config import TrainConfig
from gregale.services.run_directory import RunDirectory


def rows_of(config: TrainConfig) -> dict[int, dict]:
    """Trains (or goes on with, or reads) a run; what metrics.jsonl says of each step.

    Raises `SystemExit` if the run was interrupted.
    """
    from gregale.programs.train.command import TrainOptions, main

    run = RunDirectory(Path(config.runs) / config.name)
    if not is_done(config):
        print(f"--- {run.path}", flush=True)
        if main(TrainOptions(), config):
            raise SystemExit("stopped; the same command goes on from there")
    rows: dict[int, dict] = {}
    for line in run.metrics.read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    return rows


def is_done(config: TrainConfig) -> bool:
    """Whether a run of exactly this configuration has been trained and evaluated to its end."""
    run = RunDirectory(Path(config.runs) / config.name)
    return run.config.is_file() and run.read_config() == config and run.has_evaluation(config.steps)
