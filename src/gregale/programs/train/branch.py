"""Provides the branching of runs: a run begins at a later stage, with the whole state of another run."""

from dataclasses import dataclass
from typing import Any

from gregale.checkpoint.manifest import committed_steps
from gregale.checkpoint.store import Checkpoints
from gregale.errors import UserError
from gregale.programs.runtime.trained_model import find_run
from gregale.runs.config import TrainConfig
from gregale.runs.run_directory import RunDirectory
from gregale.runs.stages import changes
from gregale.storage.jsonl import read_entries

BRANCH = "branch"  # in starts.jsonl


@dataclass(frozen=True)
class Branch:
    """The beginning of a run: the checkpoint of step `step` of the run `origin`, which is only read."""

    origin: RunDirectory
    step: int
    record: dict[str, Any]  # of the run's first start

    def opened(self) -> tuple[Checkpoints, int, TrainConfig]:
        """Return the checkpoints of the origin, for a `with` statement, the step, and its configuration."""
        checkpoints = Checkpoints(self.origin.checkpoints)
        checkpoints.check(self.step)
        return checkpoints, self.step, self.origin.config_at(self.step)


def branch_of(config: TrainConfig, stage: int | None, run: RunDirectory, fresh: bool) -> Branch | None:
    """Return the beginning of a run at a stage, counted from 1; None for a run that has a checkpoint, or no `--stage`.

    Raises `UserError` if the run began in another way, or if `start_from` has no checkpoint with which it can begin.
    """
    first = {} if fresh else next(iter(read_entries(run.starts).entries), {})
    began, is_saved = first.get(BRANCH), not fresh and run.newest_step() is not None
    if stage is None:
        if began is not None and not is_saved:
            raise UserError(
                f"{run.path} began at stage {first.get('stage')} and has no checkpoint yet. Give --stage "
                f"{first.get('stage')} again, or --fresh to begin at step 0."
            )
        return None
    step = _first_step(config, stage)
    record = {"start_from": config.start_from, "step": step}
    if first and began != record:
        raise UserError(
            f"--stage: {run.path} is a run that did not begin after step {step:,} of {config.start_from}. Give the new "
            "run another `name`, or --fresh, which sets the old run aside. Without --stage the old run goes on."
        )
    return None if is_saved else Branch(_origin(config, run, stage, step), step, {BRANCH: record})


def _first_step(config: TrainConfig, stage: int) -> int:
    """Return the number of steps before a stage, which has to be one that a run with a `start_from` can begin at."""
    count = len(config.each_stage)
    if not 2 <= stage <= count:
        later = f"2 to {count} would work" if count > 1 else "`stages` would add one"
        raise UserError(f"--stage is {stage}, but the configuration has {count} stage(s); {later}.")
    if config.start_from is None:
        raise UserError(
            f"--stage is {stage}, but start_from is not given. It names the run whose state stage {stage} begins with."
        )
    if config.adapter is not None or config.each_stage[stage - 1].config.objective.needs_reference:
        key = "objective" if config.adapter is None else "adapter"
        raise UserError(f"--stage: `{key}` freezes the model that start_from names. Leave --stage out.")
    return config.each_stage[stage - 1].first


def _origin(config: TrainConfig, run: RunDirectory, stage: int, step: int) -> RunDirectory:
    """Return the run of `start_from`, which has a checkpoint of a step and can go on with this configuration."""
    origin = find_run(str(config.start_from))
    if origin.path.absolute() == run.path.absolute():
        raise UserError(f"start_from: {origin.path} is this run itself. Give the branch another `name`.")
    there = committed_steps(origin.checkpoints)
    if step not in there:
        has = f"checkpoints of the steps {', '.join(f'{each:,}' for each in there)}" if there else "no checkpoint"
        raise UserError(
            f"stages.{stage - 2}.from: stage {stage} begins after step {step:,}, but {origin.path} has {has}. Begin "
            "the stage after one of these steps, or keep more of them (`checkpoint.keep_every`)."
        )
    if fixed := [change for change in changes(origin.config_at(step), config.at(step)) if change.fixed]:
        found = "; ".join(f"{change} ({change.fixed.why})" for change in fixed if change.fixed)
        raise UserError(
            f"start_from: {origin.path} cannot go on with the stages before stage {stage}: {found}. Restore these keys."
        )
    return origin
