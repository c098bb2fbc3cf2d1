"""Where islands keep what is theirs: on a disk, always."""

from __future__ import annotations

from pathlib import Path

from gregale.data.sources.base import expand
from gregale.errors import UserError
from gregale.services.config import TrainConfig
from gregale.services.run_directory import RunDirectory
from gregale.storage import is_url


def folder_of_runs(config: TrainConfig) -> Path:
    """`runs` as a path; raises `UserError` if it is an object store."""
    if is_url(config.runs):
        raise UserError(
            f"runs is {config.runs}: an island keeps its outer side, and what others heal from, on a disk of its "
            f"own. Give a folder; it is `gregale train` that takes a store."
        )
    return Path(expand(config.runs))


def folder_of(run: RunDirectory) -> Path:
    """The directory of an island's run."""
    assert isinstance(run.path, Path)
    return run.path
