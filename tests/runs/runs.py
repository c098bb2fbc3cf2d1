"""Run directories as `gregale train` leaves them, written by hand: no model, no JAX."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gregale.checkpoint.manifest import MANIFEST, METADATA, folder_name, write_manifest
from gregale.storage import digest, files_below

CONFIG = {
    "steps": 10,
    "data": {"held_out": 0.1, "validation": {}},
    "evaluation": {"every": None},
    "sync": {"type": "psdp"},
    "reduce": {"codec": "none"},
    "islands": {"lighthouse": None},
}
START = {"step": 0, "time": "2026-11-22T10:00:00+00:00", "devices": 8, "device_kind": "cpu", "mesh": {"replica": 2}}


def step_line(step: int, **others: Any) -> dict[str, Any]:
    """A step's line: its loss falls by a hundredth a step, and a step takes half a second."""
    figures = {"loss": 4 - step / 100, "tokens": 256 * step, "tokens_per_second": 512.0, "step_seconds": 0.4}
    return {"step": step, **figures, "elapsed_seconds": step / 2, "data_seconds": step / 20, **others}


def write_lines(run: Path, *lines: Mapping[str, Any]) -> None:
    """Adds lines to the run's metrics."""
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def write_starts(run: Path, *starts: Mapping[str, Any]) -> None:
    (run / "starts.jsonl").write_text("".join(f"{json.dumps({**START, **start})}\n" for start in starts))


def write_run(
    run: Path,
    done: int,
    saved: int | None = None,
    evaluated: bool = False,
    metadata: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A run that has done and logged some steps, with a checkpoint of step `saved` and what is noted beside it."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **config}))
    write_starts(run, {})
    write_lines(run, *(step_line(step, replica_bytes=1000 * step) for step in range(1, done + 1)))
    if evaluated:
        write_lines(run, {"step": done, "eval_loss": 3.5, "bits_per_byte": 2.0})
    if saved is not None:
        folder = run / "checkpoints" / folder_name(saved)
        folder.mkdir(parents=True)
        (folder / "arrays").write_bytes(b"abc" * saved)
        (folder / "save").mkdir()
        (folder / "save" / METADATA).write_text(json.dumps(metadata or {}))
        seal(folder)
        (run / "newest_checkpoint.json").write_text(json.dumps({"step": saved}))
    return run


def seal(folder: Path) -> None:
    """Writes the manifest of a checkpoint for its files as they are."""
    contents = {name: (folder / name).read_bytes() for name in files_below(folder) if name != MANIFEST}
    write_manifest(folder, {name: {"bytes": len(each), "blake2b": digest(each)} for name, each in contents.items()})
