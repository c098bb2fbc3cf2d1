"""`gregale island`: an ordinary run that trains at one site; DiLoCo synchronises it with others over a network."""

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, TypeVar

import jax

import gregale
from gregale.checkpoint.files import not_finite
from gregale.checkpoint.multihost import by_first_process, first_message, messages_of_all
from gregale.checkpoint.store import Checkpoints
from gregale.data.mixtures import MixtureHistory, with_mixture
from gregale.data.preparation import Corpus
from gregale.data.sources.base import expand
from gregale.distributed.agreement import ABSENT, difference, format_term, from_text, to_text
from gregale.distributed.liveness import Elapsed, Phase
from gregale.errors import UserError
from gregale.islands.config import IslandsConfig, settings_of
from gregale.islands.driver import Driver
from gregale.islands.hosts import Follower, HostConnection, HostGroup, HostWorker, RemoteHost, joint_digest
from gregale.islands.method import Island
from gregale.islands.outer import HostOuter
from gregale.islands.protocol.ledger import LeasePolicy, digest_of
from gregale.islands.protocol.member import Identity, Member
from gregale.islands.protocol.messages import Columns, OuterRecord, Rules, seed, timing_of, unpack
from gregale.islands.protocol.trainer_side import REDUCES
from gregale.islands.state import (
    DataLeases,
    expected,
    fleet_mixtures,
    keep_rounds,
    read_outer,
    stage_rounds,
    write_outer,
)
from gregale.islands.steps import IslandResources, IslandSteps, StatusTracker
from gregale.islands.trainer_command import RoundPacing
from gregale.islands.transport.coordinator import CoordinatorClient, headers_of_fleet
from gregale.islands.transport.lighthouse import NAME
from gregale.islands.transport.server import Endpoint, Server
from gregale.islands.transport.tls import NEW_KEY, read_credentials
from gregale.methods.schedule import Schedule
from gregale.programs.command import Command
from gregale.programs.runtime.memory import check_program
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.trained_model import FrozenSource, spike_window
from gregale.programs.train.command import PreparedRun, prepared
from gregale.programs.train.loop import Evaluation, Loop, Saving, Steps
from gregale.programs.train.resume import Start, converted
from gregale.programs.train.stages import OF_A_STEP, OF_AN_EVALUATION, PreparedStage
from gregale.programs.train.step_log import DataPosition, Observers, StepLog, Traffic
from gregale.runs.config import TrainConfig
from gregale.runs.process_agreement import data_terms, is_trained_on, matches, terms_of
from gregale.runs.run_directory import RunDirectory
from gregale.runs.stages import changes
from gregale.settings import setting
from gregale.storage import StoragePath, StoreError, write_bytes
from gregale.storage.jsonl import ResumePoint, lines_at
from gregale.tracking.callback import Callbacks, Metrics, RunInfo, StepContext
from gregale.tracking.trackers import open_trackers
from gregale.training.state import TrainState, state_shardings

OUTER = "outer"
LEASE_PERIODS = 4
T = TypeVar("T")


def shards_of(outer: HostOuter) -> str:
    """Return a digest of the layout of this host's shards of the outer state."""
    return digest_of({name: (dtype.str, list(shape)) for name, (dtype, shape) in outer.expected().items()})


@dataclass(frozen=True)
class IslandOptions:
    fresh: bool = setting(False, "do not resume: set an existing run aside and join anew")


def main(options: IslandOptions, config: TrainConfig) -> int:
    """Train as one island; return 0 if the fleet's run is complete, 128 + the signal's number if it left before."""
    token = checked_token(settings_of(config))
    headers_of_fleet(settings_of(config).coordinators, token)  # refuses another token, before data are prepared
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
        status = StatusTracker(settings_of(config).own_name, config.steps, start.step)
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
    if steps.complete and steps.step < config.steps:
        run.console.message(f"The fleet has done all its rounds, and this island {steps.step:,} steps in them.")
    left = "Left the fleet by {signal} after step {step} and saved; the same command joins it again."
    return run.exit_code(steps, evaluation.latest, left)


def check_agrees(run: PreparedRun, token: bytes, rules: Rules) -> None:
    """Raise `UserError` if a fleet runs that would refuse this island, before programs are compiled for it.

    It asks again when the heartbeats of a fleet that has just ended have expired.
    """
    islands, stages = settings_of(run.config), [(stage.setup.config, stage.corpus) for stage in run.stages]
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
    islands, methods = settings_of(run.config), [island_of(stage.setup) for stage in run.stages]
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
    islands, schedule, timing = settings_of(config), island.schedule, timing_of(settings_of(config))
    host = jax.process_index()
    folder = directory.path / (OUTER if host == 0 else f"{OUTER}-{host}")  # of this host's shards of the outer state
    outer = HostOuter(island)
    outer.begin(start.state.method.psdp.parameters)
    saved = run.checkpoints.metadata(start.step)["islands"] if start.step else None
    server = Server(
        Endpoint(islands.bind, address=islands.address, name=first_message(islands.own_name) or ""),
        token,
        status.on_message,
        status.status,
        lambda line: say(f"refused: {line}"),
    )
    record = seed(joint_digest(messages_of_all(outer.digest)))
    if saved is not None:
        record = run_on_all(lambda: restore(outer, folder, saved["round"]))
        digest = joint_digest(messages_of_all(outer.digest))
        run_on_all(lambda: check_restored(record, digest, folder))
        check_stage(run.number, record)
    worker = HostWorker(outer, schedule, server, token, timing, host, expected(start.state.method.psdp))
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
    write_bytes(directory.address, server.inside_address.encode())
    note_stalled(directory, None)
    session = secrets.token_hex(8)
    holder = saved["holder"] if saved else session
    batches = tuple(each.batch.size for each, _ in stages)
    identity = Identity(islands.own_name, session, agreed, gregale.__version__, addresses, batches)
    used = saved["used"] if saved and saved.get("stage", 0) == run.number else 0
    leases = DataLeases(islands.own_name, holder, config.batch.size, used, run.number)
    rounds = lines_at(directory.rounds, ResumePoint("round", record.round), say)
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
    with suppress(OSError, StoreError):
        write_bytes(run.stalled, (line or "").encode())


def restore(outer: HostOuter, folder: StoragePath, number: int) -> OuterRecord:
    """Load the saved outer state of a round; return its record. Raises `UserError` if it cannot be used."""
    read = read_outer(folder, number)
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


class IslandSaving(Saving):
    """Saves both states: the outer one, which is in memory already, then the inner one in the background."""

    def __init__(
        self,
        setup: Setup,
        corpus: Corpus,
        checkpoints: Checkpoints,
        observers: Observers,
        steps: IslandSteps,
        counts: tuple[Traffic, DataPosition],
        resources: IslandResources,
    ):
        super().__init__(setup, corpus, checkpoints, observers, steps, counts)
        self._island, self._resources = steps, resources
        self._stagger = CheckpointStagger(setup.config.checkpoint.steps, resources.controller.pace)

    def turns(self, seconds: float) -> Elapsed:
        """Return turns by clocks that count from the same time at all sites, so that offsets keep them apart."""
        return Elapsed(seconds, time.time, begin=0.0)

    def _is_due(self, step: int) -> bool:
        island = self._island
        if self._elapsed is not None:
            return self._elapsed.is_due(step, island.save_offset)
        ended = island.ended or island.ended_stage
        return not ended and self._stagger.is_due(island.arrived, island.save_offset)

    def after_step(self, pause: StepContext) -> Metrics:
        resources, island = self._resources, self._island
        if island.ended or island.ended_stage:  # a round may have ended since the last save of this step
            self._checkpoints.outdate(pause.step)
        outer, moment = resources.controller.side
        if outer is None or pause.step == 0:
            return {}
        is_broken = not island.ended and not_finite(pause.state.method)
        if is_broken and first_message("it has peers" if resources.controller.diverged() else None):
            return {}  # the next command replaces the state on all hosts

        def save_outer() -> None:
            keep_rounds(resources.folder, rounds_of(self._checkpoints) | {outer.round})
            leaves, own_leaves = resources.outer.leaves(moment), resources.outer.own_leaves(moment)
            write_outer(resources.folder, outer, leaves, own_leaves)
            self._observers.callbacks.flush()
            resources.flush()

        counted = {
            "round": outer.round,
            "seen": island.seen(),
            "complete": island.complete,
            "stage": island.stage,
            **resources.controller.to_save(island.batches),
        }
        self._save(pause, {"islands": counted}, save_outer)
        return {}


def rounds_of(checkpoints: Checkpoints) -> set[int]:
    """Return the rounds of the checkpoints, whose outer states must be kept.

    An unreadable checkpoint has none. Raises `StoreError` if the store fails, because that checkpoint may be valid.
    """
    found = set()
    for step in checkpoints.steps():
        try:
            found.add(checkpoints.metadata(step)["islands"]["round"])
        except StoreError:
            raise
        except (UserError, KeyError):
            continue
    return found


class CheckpointStagger:
    """Save turns: once in `every` steps of the fleet's schedule, at this island's offset; never with `every` None.

    So the islands save one after the other. After the loss of a whole fleet, the newest of their checkpoints is younger
    than `every` steps. With offset k / R the turns are after k / R, 1 + k / R, ... times `every` steps.
    """

    def __init__(self, every: int | None, pace: RoundPacing):
        self._every, self._pace = every, pace
        self._last: int | None = None  # number of the last turn

    def is_due(self, arrived: int | None, offset: float) -> bool:
        """Return whether it is this island's turn, and take the turn; call it after each step.

        - `arrived`: the newest round in its parameters; None: none yet
        - `offset`: in [0, 1); a change of membership moves it, which may delay a turn by up to `every` steps
        """
        if self._every is None or arrived is None:
            return False
        turn = math.floor(self._pace.round_step(arrived) / self._every - offset)
        last = math.floor(self._pace.round_step(arrived - 1) / self._every - offset)
        last = last if self._last is None else self._last
        self._last = max(turn, last)
        return turn > last


# Configuration keys. All islands share one order of examples. Batch sizes may differ: messages are weighted by their
# tokens, and data is leased in batches of each island's own size.
MUST_AGREE = (
    *("steps", "seed", "model.*", "sync.*", "reduce.*", "pipeline", "pipeline.*"),
    *("adapter", "adapter.type", "adapter.rank", "adapter.alpha", "adapter.scaling", "adapter.targets", "adapter.base"),
    "objective.*",
    "batch.sequence_length",
    *("data.sources", "data.held_out", "data.shuffle", "data.cross_documents"),
    *(f"data.sources.*.{key}" for key in ("weight", "packing", "long_documents")),
    *("islands.min_members", "islands.min_members_to_start", "islands.lockstep", "islands.lease_steps"),
    *("islands.outlier_factor", "islands.network"),
)


SHAPES = "the digest of the shapes of the mesh's shards"


def island_of(setup: Setup) -> Island:
    assert isinstance(setup.method, Island)
    return setup.method


def agreement(
    stages: Sequence[tuple[TrainConfig, Corpus]],
    rounds: Sequence[int],
    shards: Sequence[str],
    base: FrozenSource | None = None,
) -> str:
    """Return the settings and text that all islands must share, for an island's header.

    - `stages`: the configuration and the text of each stage; of a later one the terms have what it changes
    - `rounds`: after how many rounds each stage but the first begins
    - `shards`: `shards_of` of each of the island's hosts
    """
    frozen = {} if base is None else {"the digest of the frozen weights": base.digest}
    hosts = {"the number of an island's hosts": str(len(shards))}
    heartbeat = timing_of(settings_of(stages[0][0])).heartbeat_seconds
    seconds = {"islands.heartbeat_seconds": format_term(heartbeat)}
    if (coordinators := len(settings_of(stages[0][0]).coordinators)) > 1:
        seconds["the number of coordinators"] = str(coordinators)
    shapes = {SHAPES: digest_of(list(shards))}
    first, *_ = terms = [stage_terms(*stage) for stage in stages]
    later = {f"stages.{number}.from": f"round {round}" for number, round in enumerate(rounds)}
    for number, (before, now) in enumerate(pairwise(terms)):
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        later |= {f"stages.{number}.{key}": now.get(key, ABSENT) for key in keys}
    return to_text(hosts | first | seconds | later | shapes | frozen)


def disagreement(fleet: Columns, name: str, version: str, agreed: str) -> str:
    """Return why most islands of a fleet would refuse this one before its shards and frozen weights are known; or "".

    - `fleet`: the headers of its islands; those of earlier processes with this island's `name` do not count
    - `version`, `agreed`: of this island; `agreement` without them
    """
    found = zip(*(unpack(fleet, key) for key in ("name", "version", "agreement")), strict=True) if fleet else ()
    counts = Counter((theirs, text) for other, theirs, text in found if other != name)
    if not counts:
        return ""
    (theirs, text), _ = counts.most_common(1)[0]
    if theirs != version:
        return f"the fleet runs Gregale {theirs} and this island {version}"
    terms, own = from_text(text), {key: value for key, value in from_text(agreed).items() if key != SHAPES}
    return difference({"the fleet": {key: terms[key] for key in own if key in terms}, "this island": own})


def stage_terms(config: TrainConfig, corpus: Corpus) -> dict[str, str]:
    settings = {key: value for key, value in terms_of(config).items() if matches(key, MUST_AGREE)}
    return settings | {key: value for key, value in data_terms(corpus).items() if is_trained_on(key)}


def check_mixtures(config: TrainConfig, number: int, mixtures: MixtureHistory) -> None:
    """Raise `UserError` if a checkpoint has mixtures that are of none of the stages up to `number`."""
    known = [(each.weighed, each.length) for each in fleet_mixtures(config, range(1, number + 1))]
    if any((each.weighed, each.length) not in known for each in mixtures):
        raise UserError(
            "data.sources: the sources or their weights have changed, and all islands of a fleet have drawn from the "
            "others. Put the old ones back and give the new ones in a stage that has not begun, or start another fleet "
            "with a new name."
        )


def next_start(start: Start, steps: Steps, counts: tuple[Traffic, DataPosition], before: Setup, setup: Setup) -> Start:
    """Return the point at which a stage begins: the state of the stage before, and the counts so far.

    - `start`: of the stage before, which has made these `steps`
    """
    traffic, consumed = counts
    examples = consumed.examples(steps.step)
    mixtures = with_mixture(start.mixtures, examples, *setup.config.mixture)
    state = moved(steps.state, before, setup, steps.step)
    return Start(state, steps.step, traffic.bytes_sent(steps.step), examples, mixtures, start.base)


def moved(state: TrainState, before: Setup, setup: Setup, step: int) -> TrainState:
    """Return the state of a stage for the next one, as a checkpoint between them would give it.

    On another mesh the errors of quantised messages begin from zero; another window of spikes begins empty.
    """
    method = setup.method
    if before.layout.mesh.shape != setup.layout.mesh.shape:
        state = state._replace(method=method.without_error(state.method))
    if spike_window(before) != spike_window(setup):
        state = state._replace(spikes=None)
    places = state_shardings(method, state)
    state = converted(setup, jax.device_put(state, places), step, method)
    if state.spikes is None and setup.config.skip_spikes is not None:
        state = state._replace(spikes=setup.new_spikes(step))
    return state


def compile_programs(stage: PreparedStage) -> None:
    """Compile the programs of a stage, so that no island waits for a compiler later; raise `UserError` for memory."""
    for of, compile_ in compilations(stage):
        check_program(stage.setup, of, compile_())


def compilations(stage: PreparedStage) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what each program of a stage is of, and a function that compiles it from shapes alone."""
    setup, island = stage.setup, island_of(stage.setup)
    state = setup.abstract_state()
    yield from zip(repeat(OF_A_STEP), stage.stepper(island).compilations(state, setup.abstract_batch, [1]))
    yield from zip(repeat("a round"), island.compilations(state.method))
    yield from zip(repeat(OF_AN_EVALUATION), stage.evaluations(island, range(1, setup.config.steps + 1)))
