"""Provides `gregale train`, which trains, evaluates, saves and resumes a run."""

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial

import jax

from gregale.checkpoint.multihost import agreed, by_first_process, first_message
from gregale.checkpoint.store import Checkpoints
from gregale.data.preparation import Corpus
from gregale.data.tokenizers import save_tokenizer
from gregale.distributed.devices import start_devices
from gregale.distributed.liveness import Phase, Progress, monitor_peers
from gregale.distributed.signals import SIGNALS, StopRequest, stop_on_signals
from gregale.errors import UserError
from gregale.programs.command import Command
from gregale.programs.plan.estimates import optimizer_note
from gregale.programs.runtime.default_sizes import with_what_is_left_out
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.trained_model import find_origin
from gregale.programs.train.exports import Exports
from gregale.programs.train.loop import HELP, Evaluation, Loop, MeshSteps, Saving, Steps, on_checkpoint, summary
from gregale.programs.train.resume import Branch, Start, branch_of, keep_what_came_with, origin_of, starting_point
from gregale.programs.train.stages import PreparedStage, check_stages, describe, prepare_stages
from gregale.programs.train.step_log import DataPosition, Observers, StepLog, Traffic
from gregale.runs.config import TrainConfig
from gregale.runs.process_agreement import process_terms
from gregale.runs.run_directory import RunDirectory
from gregale.runs.run_lock import hold_run_lock
from gregale.runs.sections import GUESTS
from gregale.runs.stages import Change, changes, number_after
from gregale.settings import Settings, setting, whole
from gregale.storage import storage_path
from gregale.tracking.callback import RunInfo
from gregale.tracking.profile import Profile, Window
from gregale.tracking.trackers import Console, open_trackers
from gregale.training.compiler import keep_compiled

SPARSE_ROUNDS = 200  # fewer send some values hardly once


@dataclass(frozen=True)
class TrainOptions(Settings):
    """Options of the command, beside the configuration."""

    fresh: bool = setting(False, "do not resume: archive an existing run and start again")
    stage: int | None = setting(
        None,
        "begin at this stage, with the checkpoint of start_from at its first step and the optimizer's state",
        range=whole(2),
    )
    profile: str | None = setting(
        None, "START:STOP: trace these steps, both included, for xprof, TensorBoard and Perfetto"
    )


def main(options: TrainOptions, config: TrainConfig) -> int:
    """Train; return 0 for a complete run, 128 + the signal's number for a stopped one.

    The command checks the configuration, the devices and the data before it writes to the run directory. In a run of
    several processes, each process ends if another is lost.
    """
    config.fleet.check_alone()
    with prepared(config, options.fresh, options.stage, options.profile) as run:
        return train(run)


@dataclass(frozen=True)
class PreparedRun:
    """A run that this process may train: its configuration is checked, its data are ready, and its lock is held.

    - `open_checkpoints`: opens the run's checkpoints under the rules and callbacks of a stage
    - `progress`: records the current phase, for hang detection
    - `stop`: the requests of signals to end the run
    - `branch`: the beginning of a run that has no checkpoint yet; None: its first step, or `start_from` alone
    - `window`: the steps to trace
    """

    config: TrainConfig  # with all stages
    stages: tuple[PreparedStage, ...]
    number: int  # of the stage at hand
    directory: RunDirectory
    checkpoints: Checkpoints
    open_checkpoints: Callable[[Setup], Checkpoints]
    exports: Exports
    console: Console
    progress: Progress
    stop: StopRequest
    branch: Branch | None = None
    window: Window | None = None

    @property
    def stage(self) -> PreparedStage:
        return self.stages[self.number]

    @property
    def setup(self) -> Setup:
        return self.stage.setup

    @property
    def corpus(self) -> Corpus:
        return self.stage.corpus

    @property
    def stage_metadata(self) -> dict[str, int]:
        """Return the number of the stage at hand, from 1, and the number of stages; nothing if there is one."""
        return {"stage": self.number + 1, "stages": len(self.stages)} if len(self.stages) > 1 else {}

    def branch_at(self, step: int) -> Branch | None:
        """Return the origin of a run that begins after this step."""
        return self.branch if self.branch is not None and self.branch.step == step else None

    def starting_point(
        self, stage_after: Callable[[int], int] | None = None
    ) -> tuple["PreparedRun", Start, list[Change]]:
        """Return this run in the stage after its newest intact checkpoint, its state, and the keys that have changed.

        A run begins, resumes and goes from stage to stage in this way.

        - `stage_after`: returns the number of the stage after the checkpoint of a step; default: as the steps tell
        """
        if note := by_first_process(lambda: self.directory.check_checkpoints(self.checkpoints.steps()), None):
            self.console.message(note)
        step = self.checkpoints.sound_step()
        if step is None and self.branch is not None:
            opened, step, before = self.branch.opened()
        else:
            opened, before = nullcontext(), self.directory.saved_config(step)
        run, number = self, (stage_after or partial(number_after, self.config.each_stage))(step or 0)
        if number != self.number:
            checkpoints = self.open_checkpoints(self.stages[number].setup)
            run = replace(self, number=number, checkpoints=checkpoints)
        with opened as of_origin:
            start = starting_point(run.setup, before, of_origin or run.checkpoints, step, run.corpus)
        return run, start, changes(before, run.setup.config) if before is not None and start.step else []

    def is_ended(self, start: Start, changed: Sequence[Change]) -> bool:
        """Return whether a callback has ended the run, and report it; after a change that may undo it the run goes on.

        - `changed`: the keys that have changed since
        """
        config, step, saved = self.setup.config, start.step, self.directory.saved()
        if (reason := first_message(saved.stop_reason if saved.step == step else None)) is None:
            return False
        if any(change.key in ("steps", "callbacks") for change in changed):
            by_first_process(lambda: self.directory.note_checkpoint(step), None)
            return False
        self.console.message(
            f"{config.name} is complete: a callback ended it after step {step} of {config.steps}: {reason}. With other "
            "`callbacks` or `steps` it would go on from there, --fresh begins anew."
        )
        return True

    def record_start(self, start: Start, changed: Sequence[Change]) -> RunInfo:
        """Write the files of the run that belong to a start, in process 0; return its facts for the trackers."""
        config, run, step, branch = self.setup.config, self.directory, start.step, self.branch_at(start.step)

        def write() -> None:
            run.record_changes(step, changed)
            begun = {} if branch is None else branch.record
            run.record_start(step, self.setup.run_metadata | self.stage_metadata | begun)
            run.write_config(self.config)
            run.write_samples(step + 1, [])
            save_tokenizer(self.corpus.tokenizer, run.path)
            if branch is not None or (config.start_from is not None and not step):
                keep_what_came_with(branch.origin if branch else origin_of(config), run)

        by_first_process(write, None)
        return RunInfo(run.path, config.name, asdict(config), step, is_writer())

    def exit_code(self, steps: Steps, evaluation: dict[str, float], stopped: str) -> int:
        """Return the command's exit code after the last step, and report the result.

        - `stopped`: the message about a run that a signal ended, with `{signal}` and `{step}`

        Raises `UserError` if the last checkpoint could not be saved.
        """
        config, step = self.setup.config, steps.step
        self.exports.wait()
        if self.checkpoints.failure:
            raise agreed(
                f"The run ended after step {step} of {config.steps}, but its last checkpoint could not be saved: "
                f"{self.checkpoints.failure}. {self.directory.resume_hint()}"
            )
        if self.stop.is_cut or not steps.complete:
            name = self.stop.signal_name or "SIGTERM"
            self.console.message(stopped.format(signal=name, step=step))
            return 128 + signal.Signals[name]
        loss = evaluation.get("eval_loss", 0.0)  # A run without evaluation has no loss.
        if not math.isfinite(loss):
            raise UserError(
                f"The run has done its {step} steps, but its held-out loss is {loss}: the model has learnt nothing "
                f"that could be used. metrics.jsonl shows where it went wrong. {HELP}"
            )
        if (reason := steps.stop_reason) is not None:
            by_first_process(lambda: self.directory.note_checkpoint(step, reason), None)
            self.console.message(f"A callback ended the run after step {step} of {config.steps}: {reason}.")
        self.console.message(summary(evaluation, self.corpus, config))
        self.console.message(self.what_to_do_next())
        return 0

    def what_to_do_next(self) -> str:
        """Return the commands that show the curves of this run, and that let its model write."""
        path = self.directory.path
        name = self.setup.config.name if path == storage_path("runs") / self.setup.config.name else path
        own = f'Its curves: `gregale report {name}`. Its text: `gregale sample {name} "The"`.'
        return " ".join(filter(None, [own, *(each.shown_by(path) for each in self.setup.config.trackers)]))


@contextmanager
def prepared(
    config: TrainConfig, fresh: bool, stage: int | None = None, profile: str | None = None
) -> Iterator[PreparedRun]:
    """Check the configuration, start the devices, prepare the data and take the run's lock, for the block.

    - `stage`: the number of the stage at which the run begins, see `branch_of`
    - `profile`: the steps to trace
    """
    window = None if profile is None else Window.parse(profile, config.steps)
    watch = start_devices(config.cpu_devices, config.distributed, process_terms(config))
    keep_compiled(config.compilation_cache)
    run = RunDirectory(config.folder)
    with monitor_peers(watch, run.resume_hint) as progress, stop_on_signals(SIGNALS) as stop, ExitStack() as stack:
        goes_on = not fresh and run.saved_config() is not None
        origin = None if goes_on or config.start_from is None else find_origin(config.start_from)
        continued = run if goes_on else None if stage is None else origin
        config, left_out = with_what_is_left_out(config, continued, origin)
        if not fresh:
            run.check_compatible(config)
        branch = branch_of(config, stage, run, fresh, origin)
        fitting = check_stages(config)
        file = None if is_writer() else stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        shown = dict.fromkeys(name for setup in fitting for name in setup.method.shown)
        console = stack.enter_context(Console(file, tuple(shown)))
        stop.report = console.message if is_writer() else stop.report
        stages = prepare_stages(config, console.progress, console.message)
        check = take_lock(stack, run, fresh, console.message)

        exports = stack.enter_context(Exports(run, console.message))

        def open_checkpoints(setup: Setup) -> Checkpoints:
            saved, rules = on_checkpoint(setup, run, exports, console.message), setup.config.checkpoint
            made = Checkpoints(run.checkpoints, rules, console.message, saved, check, exports.in_use)
            return stack.enter_context(made)

        step = by_first_process(run.newest_step, None) or (branch.step if branch else 0)
        number = number_after(config.each_stage, step)
        begun = stages[number]
        notes = stages[-1].setup.config.sync.notes(begun.setup.layout, config.steps, config.fleet.joins)
        notes += [balance_note(config), reduce_note(config), optimizer_note(begun.setup)]
        for note in filter(None, (*left_out, describe(begun.setup, begun.corpus), *notes)):
            console.message(note)
        checkpoints = open_checkpoints(begun.setup)
        yield PreparedRun(
            config, stages, number, run, checkpoints, open_checkpoints, exports, console, progress, stop, branch, window
        )


def balance_note(config: TrainConfig) -> str | None:
    """Return a note if nothing keeps the experts of a new model equally loaded."""
    experts = config.model.experts
    if experts is None or experts.balance.loss or experts.balance.bias or config.start_from is not None:
        return None
    return (
        "Nothing keeps the experts equally loaded: some may get most of the tokens. "
        "model.experts.balance {bias: true} or {loss: 0.01} does; `expert_load_max` and `expert_load_entropy` show it."
    )


def reduce_note(config: TrainConfig) -> str | None:
    """Return a note if the second phase stays in float32, or if `topk` has few rounds."""
    rounds = config.sync.outer_rounds
    if config.reduce.codec == "topk" and rounds is not None:
        count = rounds.schedule(layers=2**31).outer_steps(rounds.warm_up(), config.steps)
        return (
            f"reduce.codec topk sends few of the values in a round, and the others later. This run has {count} rounds; "
            "after 74 a small model was 0.07 nats behind int4."
            if count < SPARSE_ROUNDS
            else None
        )
    if config.reduce.codec == "none" or config.reduce.second != "none" or config.reduce.phases == 1:
        return None
    return (
        f"The second phase of messages stays in float32: reduce.codec {config.reduce.codec} shortens the first alone. "
        "reduce.gather_codec int4 shortens it too."
    )


def take_lock(stack: ExitStack, run: RunDirectory, fresh: bool, report: Callable[[str], None]) -> Callable[[], None]:
    """Take the run's lock in process 0, until the stack closes; return a check that process 0 still holds it.

    With `fresh`, archive the old run first, which no process may be training.
    """

    def take() -> Callable[[], None]:
        if fresh and run.path.exists():
            with hold_run_lock(run.path, report):
                archived = run.archive()
            report(f"The old run is now {archived}.")
        check = stack.enter_context(hold_run_lock(run.path, report))
        run.checkpoints.mkdir(exist_ok=True)
        return check

    return by_first_process(take, lambda: None)


def is_writer() -> bool:
    """Return whether this process writes the files of the run."""
    return jax.process_index() == 0


def train(run: PreparedRun) -> int:
    """Train from the newest valid checkpoint, or from the beginning, to the end or until a signal."""
    run, start, changed = run.starting_point()
    if run.is_ended(start, changed) or is_complete(run, start):
        return 0
    console, step, among = run.console, start.step, f"stage {run.number + 1} of {len(run.stages)}"
    if step:
        stage = f", in {among}" if len(run.stages) > 1 else ""
        begins = "Going on" if (branch := run.branch_at(step)) is None else f"Branching from {branch.origin.path}"
        rate = f"The next step has a learning rate of {run.setup.learning_rate(step + 1):.3g}."
        console.message(f"{begins} after step {step} of {run.config.steps}{stage}. {rate}")
    if changed:
        console.message(f"Changed since step {step}: {'; '.join(map(str, changed))}.")
    if run.window is not None and run.window.last <= step:
        console.message(f"Nothing is traced: the steps {run.window} of --profile were done before.")
    with closing(Profile(run.window, run.directory.profiles, console.message)) as profile:
        while (code := train_stage(run, start, changed, profile)) is None:
            run, start, changed = run.starting_point()
            among = f"Stage {run.number + 1} of {len(run.stages)}"
            console.message(f"{among} begins after step {start.step}: {'; '.join(map(str, changed)) or 'no change'}.")
    return code


def is_complete(run: PreparedRun, start: Start) -> bool:
    """Return whether a run has done its steps, and the evaluation and the callbacks of the last one; report it."""
    config, console, step = run.setup.config, run.console, start.step
    finished = not start.unfinished and (not config.evaluates or run.directory.has_evaluation(step))
    if step < config.steps or (step == config.steps and not finished):
        return False
    if (damaged := run.directory.figures().problem) is not None:  # A run that resumes repairs the file and reports it.
        console.message(damaged)
    console.message(
        f"{config.name} is complete: it has done {step} steps, and `steps` is {config.steps}. A larger "
        f"`steps` would go on from there, --fresh begins anew."
    )
    return True


def train_stage(run: PreparedRun, start: Start, changed: Sequence[Change], profile: Profile) -> int | None:
    """Train to the end of a stage, or until a signal; return the command's exit code, or None if a stage follows."""
    setup, corpus, console = run.setup, run.corpus, run.console
    config, first_step = setup.config, start.step
    info = run.record_start(start, changed)
    console.begin(config.steps, first_step)
    with open_trackers(config.trackers, setup.callbacks, info, console) as callbacks:
        observers = Observers(callbacks, console.message, run.progress)
        steps = MeshSteps(run.stage, start, run.stop, observers, *run.stages[run.number + 1 :][:1])
        counts = (
            Traffic(setup, first_step, start.replica_bytes),
            DataPosition(config.batch, first_step, start.examples, start.mixtures),
        )
        evaluation = Evaluation(run.stage, run.directory, observers, steps)
        saving = Saving(setup, corpus, run.checkpoints, observers, steps, counts)
        log = StepLog(setup, observers, *counts)
        run.stop.unsaved = lambda: log.done > first_step or jax.process_count() > 1  # where all end together
        step = Loop(run.stage, steps, log, observers, evaluation, saving, [profile]).run()
    run.checkpoints.wait()
    if steps.ended_stage and not run.checkpoints.failure:
        run.progress.at(step, Phase.PREPARING)
        return None
    run.progress.at(step, Phase.ENDING)
    stopped = "Stopped by {signal} after step {step} and saved; the same command goes on from there."
    return run.exit_code(steps, evaluation.latest, stopped)


READS = tuple(each.name for each in fields(TrainConfig) if each.name not in GUESTS)
COMMAND = Command(main=main, options=TrainOptions, config=TrainConfig, reads=READS, positional=("config",))
