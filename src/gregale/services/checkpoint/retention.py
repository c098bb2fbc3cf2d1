"""Which checkpoints there are, what their files are called, and which of them stay."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gregale.settings import Settings, whole

LEAVES = "leaves.json"
METADATA = "metadata.json"

_COMMITTED = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"step-\d{8,}\.(partial|deleted)")


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


def arrays_name(step: int) -> str:
    """The name of Orbax's folder; it builds the names of its barriers from it, and a barrier's should be used once."""
    return f"arrays-{step:08d}"


def committed_steps(directory: Path) -> list[int]:
    """The steps with a committed checkpoint (sound or not), in ascending order."""
    if not directory.is_dir():
        return []
    matches = (_COMMITTED.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match.group(1)) for match in matches if match)


def unfinished(directory: Path) -> list[Path]:
    """Folders that a killed process left half-written or half-deleted."""
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if _UNFINISHED.fullmatch(path.name) and path.is_dir()]


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
