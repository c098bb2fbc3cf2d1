"""`gregale island`: an ordinary run that trains at one site; DiLoCo synchronises it with others over a network."""

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax

import gregale
from gregale.checkpoint.multihost import by_first_process, first_message, messages_of_all
from gregale.data.sources.base import expand
from gregale.distributed.liveness import Phase
from gregale.errors import UserError
from gregale.islands import outer_checkpoint
from gregale.islands.data_leases import DataLeases
from gregale.islands.driver import Driver
from gregale.islands.follower import Follower
from gregale.islands.host_connection import HostConnection, RemoteHost
from gregale.islands.host_group import HostGroup, joint_digest
from gregale.islands.host_worker import HostWorker, Timeouts
from gregale.islands.inner_optimizer_state import expected
from gregale.islands.protocol.headers import OuterRecord, seed
from gregale.islands.protocol.ledger import LeasePolicy, digest_of
from gregale.islands.protocol.member import Member
from gregale.islands.protocol.member_state import Identity
from gregale.islands.protocol.settings import Rules, heal_seconds, timing_of
from gregale.islands.protocol.trainer_side import REDUCES
from gregale.islands.stages import fleet_mixtures, stage_rounds
from gregale.islands.trainer_command import RoundPacing
from gregale.islands.transport.coordinator import CoordinatorClient, headers_of_fleet
from gregale.islands.transport.lighthouse import NAME
from gregale.islands.transport.server import Server
from gregale.islands.transport.tls import NEW_KEY, read_credentials
from gregale.methods.island_outer import HostOuter
from gregale.methods.schedule import Schedule
from gregale.programs.command import Command
from gregale.programs.island.saving import IslandSaving
from gregale.programs.island.stages import (
    agreement,
    check_mixtures,
    compilations,
    compile_programs,
    disagreement,
    island_of,
    next_start,
)
from gregale.programs.island.status import StatusTracker
from gregale.programs.island.steps import IslandResources, IslandSteps
from gregale.programs.train.command import PreparedRun, prepared
from gregale.programs.train.loop import Evaluation, Loop
from gregale.programs.train.resume import Start
from gregale.programs.train.step_log import DataPosition, Observers, StepLog, Traffic
from gregale.runs.config import TrainConfig
from gregale.runs.history import ROUNDS
from gregale.runs.islands import IslandsConfig
from gregale.runs.run_directory import RunDirectory
from gregale.runs.stages import changes
from gregale.settings import setting
from gregale.storage import StoragePath, StoreError, write_bytes
from gregale.storage.jsonl import ResumePoint, lines_at
from gregale.tracking.callback import Callbacks, RunInfo
from gregale.tracking.trackers import open_trackers

ADDRESS, OUTER = "island.address", "outer"
LEASE_PERIODS = 4
T = TypeVar("T")


def shards_of(outer: HostOuter) -> str:
    """Return a digest of the layout of this host's shards of the outer state."""
    return digest_of({name: (dtype.str, list(shape)) for name, (dtype, shape) in outer.expected().items()})


@dataclass(frozen=True)
class IslandOptions:
    """Options of the command, beside the configuration."""

    fresh: bool = setting(False, "do not resume: set an existing run aside and join anew")


def main(options: IslandOptions, config: TrainConfig) -> int:
    """Train as one island; return 0 if the fleet's run is complete, 128 + the signal's number if it left before."""
    token = checked_token(config.islands)
    headers_of_fleet(config.islands.coordinators, token)  # refuses another token, before data are prepared
    with prepared(config, options.fresh) as run:
        return train(run, token)


def checked_token(islands: IslandsConfig) -> bytes:
    """Return the fleet's secret or this island's key; raise `UserError` for missing or wrong settings of `islands`."""
    if islands.lighthouse is None:
        raise UserError(
            "islands.lighthouse is not set: give HOST:PORT of the coordinator, which `gregale lighthouse` runs. "
            "`gregale islands CONFIG` starts one and several islands on this machine."
        )
    if islands.token_file is None:
        raise UserError(
            "islands.token_file is not set: the islands of a fleet authenticate one another with a secret in a "
            "file that all of them have. `umask 077; head -c 32 /dev/urandom | base64 > islands.token` makes one."
        )
    if islands.own_name == NAME:
        raise UserError(
            f"islands.name: this island's name is {NAME} (the name of its host, if the key is not set), but the key of "
            "that name is a coordinator's, which speaks for the fleet. Set another name, and make its key."
        )
    path = Path(expand(islands.token_file, "islands.token_file"))
    wrong_name = "That is the host's name: set islands.name to the name of the key, on all hosts of the island."
    advice = NEW_KEY if islands.name else wrong_name
    return read_credentials(path, "islands.token_file", islands.own_name, advice)


def train(run: PreparedRun, token: bytes) -> int:
    """Join the fleet, with the newest valid checkpoint if there is one, and train until its run is complete."""
    rules = rules_of(run)
    by_first_process(lambda: check_agrees(run, token, rules), None)

    def stage_after(step: int) -> int:
        return rules.stage_at(run.checkpoints.metadata(step)["islands"]["round"]) if step else 0

    run, start, changed = run.starting_point(stage_after)
    if any(change.key == "steps" and change.before < change.now for change in changed):
        schedule = island_of(run.stages[-1].setup).schedule
        check_prolonged(schedule, run.config.steps, run.checkpoints.metadata(start.step)["islands"]["round"])
    check_mixtures(run.config, run.number, start.mixtures)
    if run.is_ended(start, changed):
        return 0
    info, config = run.record_start(start, changed), run.config
    run.stop.unsaved = lambda: True  # an island tells its peers that it leaves
    with ExitStack() as stack:
        status = StatusTracker(config.islands.own_name, config.steps, start.step)
        resources = join(run, start, token, status, rules)
        stack.callback(resources.close, run.console.message)
        status.state = "joining"
        while True:
            steps, evaluation, counts = train_stage(run, start, info, resources, status)
            if not steps.ended_stage:
                break
            run, start, info, resources = next_stage(run, start, steps, counts, resources)
        status.state = "complete" if steps.complete else "left"
        run.checkpoints.wait()
        if steps.complete and not run.checkpoints.failure:
            by_first_process(resources.controller.confirm, None)
    run.progress.at(steps.step, Phase.ENDING)
    left = "Left the fleet by {signal} after step {step} and saved; the same command joins it again."
    return run.exit_code(steps, evaluation.latest, left)


def check_agrees(run: PreparedRun, token: bytes, rules: Rules) -> None:
    """Raise `UserError` if a fleet runs that would refuse this island, before programs are compiled for it.

    It asks again when the heartbeats of a fleet that has just ended have expired.
    """
    islands, stages = run.config.islands, [(stage.setup.config, stage.corpus) for stage in run.stages]
    agreed = agreement(stages, rules.stages, [""] * jax.process_count())
    for seconds in (1.2 * timing_of(islands).heartbeat_seconds, 0.0):
        fleet = headers_of_fleet(islands.coordinators, token)
        if not (why := disagreement(fleet, islands.own_name, gregale.__version__, agreed)):
            return
        time.sleep(seconds)
    raise UserError(f"{why}; this island ends, the others go on")


def check_prolonged(schedule: Schedule, steps: int, round: int) -> None:
    """Raise `UserError` if a fleet that has made these rounds, with closing ones, has no step left to make."""
    if steps <= (last := schedule.round_step(round - 1)):
        raise UserError(
            f"steps is {steps:,}: the fleet has made {round:,} rounds, with those after its last step. These are as "
            f"many as those of {last:,} steps. Give at least {last + 1:,} steps."
        )


def rules_of(run: PreparedRun) -> Rules:
    islands, methods = run.config.islands, [island_of(stage.setup) for stage in run.stages]
    held = islands.lease_steps or LEASE_PERIODS * methods[0].schedule.period  # at least half of it always
    return Rules(
        islands.min_members,
        LeasePolicy(size=held, low=-(-held // 2)),
        islands.min_members_to_start,
        islands.lockstep,
        islands.outlier_factor,
        stage_rounds(run.config, methods),
        tuple(each.schedule.fragments for each in methods),
        methods[-1].schedule.rounds(run.config.steps - 1),
        len(islands.coordinators) > 1,
    )


def train_stage(
    run: PreparedRun, start: Start, info: RunInfo, resources: IslandResources, status: StatusTracker
) -> tuple[IslandSteps, Evaluation, tuple[Traffic, DataPosition]]:
    """Train to the end of a stage, or until the island has left; return its steps, its evaluation and its counts."""
    setup, corpus, console = run.setup, run.corpus, run.console
    config = setup.config
    console.begin(config.steps, start.step)
    with open_trackers(config.trackers, setup.callbacks, info, console) as status.callbacks:
        callbacks = Callbacks([status], flush=status.callbacks.flush)
        examples = corpus.training(fleet_mixtures(run.config, resources.firsts))
        observers = Observers(callbacks, console.message, run.progress)
        following = (each for stage in run.stages[run.number + 1 :][:1] for _, each in compilations(stage))
        steps = IslandSteps(setup, resources, examples, start, run.stop, observers, following)
        counts = (
            Traffic(setup, start.step, start.replica_bytes),
            DataPosition(config.batch, start.step, start.examples, start.mixtures),
        )
        evaluation = Evaluation(run.stage, run.directory, observers, steps)
        saving = IslandSaving(setup, corpus, run.checkpoints, observers, steps, counts, resources)
        Loop(run.stage, steps, StepLog(setup, observers, *counts), observers, evaluation, saving).run()
    return steps, evaluation, counts


def next_stage(
    run: PreparedRun,
    start: Start,
    steps: IslandSteps,
    counts: tuple[Traffic, DataPosition],
    resources: IslandResources,
) -> tuple[PreparedRun, Start, RunInfo, IslandResources]:
    """Return the run in the stage of the outer parameters that have arrived, and where it begins.

    The connection to the fleet stays, and so do the outer parameters.
    """
    run.progress.at(steps.step, Phase.PREPARING)
    run.checkpoints.wait()
    before, (number, firsts) = run.setup, steps.coming
    stage = run.stages[number]
    setup, run = stage.setup, replace(run, number=number, checkpoints=run.open_checkpoints(stage.setup))
    start = next_start(start, steps, counts, before, setup)
    resources.outer.follow(island_of(setup))
    if resources.leases is not None and number != resources.stage:
        resources.leases.begin_stage(number, setup.config.batch.size)
    run.progress.at(steps.step, Phase.COMPILING)
    compile_programs(stage)
    changed = changes(before.config, setup.config)
    assert steps.arrived is not None
    begins = f"Stage {number + 1} of {len(run.stages)} begins after round {steps.arrived + 1}, step {start.step}"
    run.console.message(f"{begins}: {'; '.join(map(str, changed)) or 'no change'}.")
    info = run.record_start(start, changed)
    return (
        run,
        start,
        info,
        replace(resources, step=run.stage.stepper(setup.method), seen=steps.seen(), stage=number, firsts=firsts),
    )


def join(run: PreparedRun, start: Start, token: bytes, status: StatusTracker, rules: Rules) -> IslandResources:
    """Return this host's outer state and trainer controller, which starts to look for the fleet."""
    setup, directory, say = run.setup, run.directory, run.console.message
    config, island = setup.config, island_of(setup)
    islands, schedule, timing = config.islands, island.schedule, timing_of(config.islands)
    host = jax.process_index()
    folder = directory.path / (OUTER if host == 0 else f"{OUTER}-{host}")  # of this host's shards of the outer state
    outer = HostOuter(island)
    outer.begin(start.state.method.psdp.parameters)
    saved = run.checkpoints.metadata(start.step)["islands"] if start.step else None
    server = Server(
        islands.bind,
        token,
        status.on_message,
        status.status,
        lambda line: say(f"refused: {line}"),
        address=islands.address,
        name=first_message(islands.own_name) or "",
    )
    record = seed(joint_digest(messages_of_all(outer.digest)))
    if saved is not None:
        record = run_on_all(lambda: restore(outer, folder, saved["round"]))
        digest = joint_digest(messages_of_all(outer.digest))
        run_on_all(lambda: check_restored(record, digest, folder))
        check_stage(run.number, record)
    timeouts = Timeouts(timing.reduce_seconds, heal_seconds(islands))
    worker = HostWorker(outer, schedule, server, token, timeouts, host, expected(start.state.method.psdp))
    if saved is not None:
        worker.publish(record)  # members behind it in a restarted fleet heal from it
    addresses, (first, *_) = (tuple(messages_of_all(each)) for each in (server.address, server.inside_address))
    stages = [(stage.setup.config, stage.corpus) for stage in run.stages]
    agreed = agreement(stages, rules.stages, messages_of_all(shards_of(outer)), start.base)
    pace = RoundPacing(schedule, config.steps, islands.lockstep, REDUCES * timing.reduce_seconds)
    say("Compiling the programs of steps and rounds before this island joins the fleet.")
    outer.compile()
    compile_programs(run.stage)
    stepper = run.stage.stepper(island)
    seen = saved["seen"] if saved else [0.0] * schedule.fragments
    stage: dict[str, Any] = {"stage_at": rules.stage_at, "stage": run.number, "firsts": record.ledger.stages}
    stage |= {"bases": {index: outer.now().part(index) for index in range(schedule.fragments)}}  # before rounds come
    if host > 0:
        follower = Follower(worker, HostConnection(first, token, host), pace)
        first_message(None)  # from here on process 0 answers
        follower.start()
        return IslandResources(stepper, outer, follower, folder, seen, **stage)
    hosts = HostGroup(
        worker, [RemoteHost(number) for number in range(1, jax.process_count())], wants_inner=saved is None
    )
    write_bytes(directory.path / ADDRESS, server.inside_address.encode())
    note_stalled(directory, None)
    session = secrets.token_hex(8)
    holder = saved["holder"] if saved else session
    batches = tuple(each.batch.size for each, _ in stages)
    identity = Identity(islands.own_name, session, agreed, gregale.__version__, addresses, batches)
    used = saved["used"] if saved and saved.get("stage", 0) == run.number else 0
    leases = DataLeases(islands.own_name, holder, config.batch.size, used, run.number)
    rounds = lines_at(directory.path / ROUNDS, ResumePoint("round", record.round), say)
    driver = Driver(
        member=Member(identity, record, timing, rules, holder, used),
        coordinator=CoordinatorClient(islands.coordinators, islands.own_name, token, timing, session),
        worker=hosts,
        leases=leases,
        pace=pace,
        token=token,
        report=lambda text, loud: say(f"{'WARNING: ' if loud else ''}{text}"),
        record=rounds.add,
        note_stalled=lambda line: note_stalled(directory, line),
        compiles=lambda: run.progress.current.phase is Phase.COMPILING,
        stop_asked=lambda: run.stop.signal_name is not None,
        steps=saved.get("steps", 0) if saved else 0,
    )
    status.follow(driver)
    first_message("it answers")
    driver.start()
    return IslandResources(stepper, outer, driver, folder, seen, rounds, leases, **stage)


def note_stalled(run: RunDirectory, line: str | None) -> None:
    """Write the reason why rounds have stopped, for `gregale watch`; ignore errors."""
    with suppress(OSError, StoreError):
        write_bytes(run.stalled, (line or "").encode())


def restore(outer: HostOuter, folder: StoragePath, number: int) -> OuterRecord:
    """Load the saved outer state of a round; return its record. Raises `UserError` if it cannot be used."""
    read = outer_checkpoint.read(folder, number)
    try:
        outer.load(read.arrays, read.versions)
        outer.load_own(read.own)
    except ValueError as error:
        raise UserError(
            f"The outer parameters in {folder} were saved by an island with other hosts, another mesh or another model "
            f"({error}). Give it what it had then, or --fresh, and it joins its peers anew."
        ) from None
    return read.outer


def check_restored(record: OuterRecord, digest: str, folder: StoragePath) -> OuterRecord:
    """Return the record if it matches the arrays of all hosts; raise `UserError` otherwise."""
    if digest != record.digest:
        raise UserError(
            f"The outer parameters in {folder} and in those of the island's other hosts are not those of round "
            f"{record.round}: their digest is {digest}, that of the round {record.digest}. Give --fresh, and it joins "
            "its peers anew."
        )
    return record


def check_stage(number: int, record: OuterRecord) -> None:
    """Raise `UserError` if the fleet has begun other stages by this round than the configuration has."""
    if (begun := len(record.ledger.stages)) != number:
        raise UserError(
            f"stages: the fleet is in stage {begun + 1} after round {record.round}, but by this configuration in stage "
            f"{number + 1}. Stages that have begun cannot change: put them back, others may change."
        )


COMMAND = Command(main=main, options=IslandOptions, config=TrainConfig, positional=("config",))


def run_on_all(action: Callable[[], T]) -> T:
    """Return the result of `action` in this process; if it fails in any process, raise `UserError` in all."""
    done, failed = None, None
    try:
        done = action()
    except UserError as error:
        failed = str(error)
    if failed := first_message(failed):
        raise UserError(failed)
    assert done is not None
    return done
