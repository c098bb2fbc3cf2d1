"""Which checkpoints there are, what their files are called, and which of them stay."""

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from gregale.checkpoint.manifest import MANIFEST
from gregale.settings import Settings, whole
from gregale.storage import StoragePath, names, status

LEAVES = "leaves.json"
METADATA = "metadata.json"

_THREADS = 8  # requests at once

_COMMITTED = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class CheckpointConfig(Settings):
    """How often to save and what to keep."""

    every: int = field(
        default=1000,
        metadata={
            "help": "Save a checkpoint every this many steps.",
            "range": whole(1),
            "aliases": ("save_steps", "save_every", "save_interval", "checkpoint_every", "ckpt_interval"),
        },
    )
    keep_last: int = field(
        default=3,
        metadata={
            "help": "Number of newest checkpoints to keep.",
            "range": whole(1),
            "aliases": ("save_total_limit", "max_to_keep", "keep"),
        },
    )
    keep_every: int | None = field(
        default=None, metadata={"help": "Keep multiples of this many steps for ever.", "range": whole(1)}
    )


def folder_name(step: int) -> str:
    """The name of a committed checkpoint's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of the checkpoint that a file or folder belongs to, by its name below the folder of checkpoints."""
    match = _COMMITTED.fullmatch(name.partition("/")[0])
    return int(match.group(1)) if match else None


def committed_steps(directory: StoragePath) -> list[int]:
    """The steps with a committed checkpoint (sound or not), in ascending order.

    A checkpoint counts if its manifest, which comes last and goes first, is there.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        folders = [name for name in names(directory) if step_of(name) is not None]
        there = list(pool.map(lambda name: status(directory / name / MANIFEST) is not None, folders))
    return sorted(step_of(name) or 0 for name, is_there in zip(folders, there, strict=True) if is_there)


def without_manifest(directory: StoragePath) -> list[str]:
    """The names of what is no committed checkpoint but has the name of one, by ascending step."""
    committed = {folder_name(step) for step in committed_steps(directory)}
    return [name for name in names(directory) if step_of(name) is not None and name not in committed]


def superfluous(steps: Iterable[int], saved: int, config: CheckpointConfig) -> list[int]:
    """The steps to delete after `saved` has been committed.

    Steps after `saved` were left by a run that went on from an earlier checkpoint (the later ones were damaged, or an
    older one was asked for); they are no part of this run's history and would be taken for its newest state.
    """
    history = sorted(step for step in steps if step <= saved)
    kept = set(history[-config.keep_last :])
    if config.keep_every is not None:
        kept |= {step for step in history if step % config.keep_every == 0}
    return [step for step in steps if step not in kept]
