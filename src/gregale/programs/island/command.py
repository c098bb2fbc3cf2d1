"""`gregale island`: an ordinary run that trains at one site; DiLoCo synchronises it with others over a network."""

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax

import gregale
from gregale.checkpoint.multihost import first_message, messages_of_all
from gregale.data.preparation import Corpus
from gregale.data.sources.base import expand
from gregale.distributed.agreement import format_term, to_text
from gregale.distributed.hang_detector import Phase
from gregale.distributed.signals import StopRequest
from gregale.distributed.signing import read_token
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
from gregale.islands.trainer_command import RoundPacing
from gregale.islands.transport.coordinator import CoordinatorClient
from gregale.islands.transport.server import Server
from gregale.methods.island import Island
from gregale.methods.island_outer import HostOuter
from gregale.programs.command import Command
from gregale.programs.island.saving import IslandSaving
from gregale.programs.island.status import StatusTracker
from gregale.programs.island.steps import IslandResources, IslandSteps
from gregale.programs.plan.shapes import abstract_batch
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.trained_model import Base
from gregale.programs.train.command import PreparedRun, prepared
from gregale.programs.train.evaluation import Evaluation
from gregale.programs.train.loop import Loop
from gregale.programs.train.resume import Start
from gregale.programs.train.step_log import DataPosition, Observers, StepLog, Traffic
from gregale.runs.config import TrainConfig
from gregale.runs.history import ROUNDS
from gregale.runs.process_agreement import data_terms, is_trained_on, matches, terms_of
from gregale.runs.run_directory import RunDirectory
from gregale.settings import setting
from gregale.storage import StoragePath, StoreError, write_bytes
from gregale.storage.jsonl_writer import ResumePoint, lines_at
from gregale.tracking.callback import Callbacks
from gregale.tracking.choices import open_trackers
from gregale.training.state import TrainState
from gregale.training.stepper import Stepper

ADDRESS, OUTER = "island.address", "outer"
LEASE_PERIODS = 4
T = TypeVar("T")
# Configuration keys. All islands share one order of examples. Batch sizes may differ: messages are weighted by their
# tokens, and data is leased in batches of each island's own size.
MUST_AGREE = (
    *("steps", "seed", "model.*", "sync.*", "reduce.*", "pipeline", "pipeline.*"),
    *("adapter", "adapter.type", "adapter.rank", "adapter.alpha", "adapter.scaling", "adapter.targets", "adapter.base"),
    "batch.sequence_length",
    *("data.sources", "data.held_out", "data.shuffle", "data.cross_documents"),
    *(f"data.sources.*.{key}" for key in ("weight", "packing", "long_documents")),
    *("islands.min_members", "islands.min_members_to_start", "islands.lockstep", "islands.lease_steps"),
    *("islands.outlier_factor", "islands.network"),
)


def agreement(setup: Setup, corpus: Corpus, shards: Sequence[str], base: Base | None = None) -> str:
    """Return the settings and text that all islands must share, for an island's header.

    - `shards`: `shards_of` of each of the island's hosts
    """
    frozen = {} if base is None else {"the digest of the frozen weights": base.digest}
    hosts = {"the number of an island's hosts": str(len(shards))}
    seconds = {"islands.heartbeat_seconds": format_term(timing_of(setup.config.islands).heartbeat_seconds)}
    settings = {key: value for key, value in terms_of(setup.config).items() if matches(key, MUST_AGREE)}
    text = {key: value for key, value in data_terms(corpus).items() if is_trained_on(key)}
    shapes = {"the digest of the shapes of the mesh's shards": digest_of(list(shards))}
    return to_text(hosts | settings | seconds | text | shapes | frozen)


def shards_of(outer: HostOuter) -> str:
    """Return a digest of the layout of this host's shards of the outer state."""
    return digest_of({name: (dtype.str, list(shape)) for name, (dtype, shape) in outer.expected().items()})


@dataclass(frozen=True)
class IslandOptions:
    """Options of the command, beside the configuration."""

    fresh: bool = setting(False, "do not resume: set an existing run aside and join anew")


def main(options: IslandOptions, config: TrainConfig) -> int:
    """Train as one island; return 0 if the fleet's run is complete, 128 + the signal's number if it left before."""
    token = checked_token(config)
    with prepared(config, options.fresh) as run:
        return train(run, token)


def checked_token(config: TrainConfig) -> bytes:
    """Return the fleet's secret; raise `UserError` for missing settings of `islands`."""
    islands = config.islands
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
    return read_token(Path(expand(islands.token_file, "islands.token_file")), "islands.token_file")


def train(run: PreparedRun, token: bytes) -> int:
    """Join the fleet, with the newest valid checkpoint if there is one, and train until its run is complete."""
    run, start, changed = run.starting_point()
    setup, corpus, console = run.setup, run.corpus, run.console
    config = setup.config
    if len(start.mixtures) > 1:
        raise UserError(
            "data.sources: the sources or their weights have changed, and all islands of a fleet have drawn from the "
            "others. Put the old ones back, or start another fleet with a new name."
        )
    if run.is_ended(start, changed):
        return 0
    info = run.record_start(start, changed)
    with StopRequest() as stop:
        with ExitStack() as stack:
            status = StatusTracker(config.islands.own_name, config.steps, start.step)
            resources = join(run, start, token, status, stop)
            stack.callback(resources.close, console.message)
            console.begin(config.steps, start.step)
            status.callbacks = stack.enter_context(open_trackers(config.trackers, setup.callbacks, info, console))
            status.state = "joining"
            callbacks = Callbacks([status], flush=status.callbacks.flush)
            observers = Observers(callbacks, console.message, run.progress)
            steps = IslandSteps(setup, resources, corpus.train, start, stop, observers)
            counts = (
                Traffic(setup, start.step, start.replica_bytes),
                DataPosition(config.batch, start.step, start.examples, start.mixtures),
            )
            evaluation = Evaluation(setup, corpus, run.directory, observers, steps)
            saving = IslandSaving(setup, corpus, run.checkpoints, observers, steps, counts, resources)
            Loop(setup, steps, StepLog(setup, observers, *counts), observers, evaluation, saving).run()
            status.state = "complete" if steps.complete else "left"
        run.checkpoints.wait()
    run.progress.at(steps.step, Phase.ENDING)
    left = "Left the fleet by {signal} after step {step} and saved; the same command joins it again."
    return run.exit_code(steps, evaluation.latest, stop, left)


def join(run: PreparedRun, start: Start, token: bytes, status: StatusTracker, stop: StopRequest) -> IslandResources:
    """Return this host's outer state and trainer controller, which starts to look for the fleet."""
    setup, directory, say = run.setup, run.directory, run.console.message
    config, island = setup.config, setup.method
    assert isinstance(island, Island)
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
    )
    record = seed(joint_digest(messages_of_all(outer.digest)))
    if saved is not None:
        record = run_on_all(lambda: restore(outer, folder, saved["round"]))
        digest = joint_digest(messages_of_all(outer.digest))
        run_on_all(lambda: check_restored(record, digest, folder))
    timeouts = Timeouts(timing.reduce_seconds, heal_seconds(islands))
    worker = HostWorker(outer, schedule, server, token, timeouts, host, expected(start.state.method.psdp))
    if saved is not None:
        worker.publish(record)  # members behind it in a restarted fleet heal from it
    addresses = tuple(messages_of_all(server.address))
    agreed = agreement(setup, run.corpus, messages_of_all(shards_of(outer)), start.base)
    pace = RoundPacing(schedule, schedule.rounds(config.steps), islands.lockstep, REDUCES * timing.reduce_seconds)
    say("Compiling the programs of steps and rounds before this island joins the fleet.")
    stepper = setup.stepper()
    compile_programs(setup, stepper, start.state, outer)
    seen = saved["seen"] if saved else [0.0] * schedule.fragments
    if host > 0:
        follower = Follower(worker, HostConnection(addresses[0], token, host), pace)
        first_message(None)  # from here on process 0 answers
        follower.start()
        return IslandResources(stepper, outer, follower, folder, seen)
    hosts = HostGroup(
        worker, [RemoteHost(number) for number in range(1, jax.process_count())], wants_inner=saved is None
    )
    write_bytes(directory.path / ADDRESS, server.address.encode())
    note_stalled(directory, None)
    session = secrets.token_hex(8)
    holder = saved["holder"] if saved else session
    identity = Identity(islands.own_name, session, agreed, gregale.__version__, addresses, config.batch.size)
    held = islands.lease_steps or LEASE_PERIODS * schedule.period  # at least half of it always
    lease_policy = LeasePolicy(size=held, low=-(-held // 2))
    used = saved["used"] if saved else 0
    rules = Rules(
        islands.min_members, lease_policy, islands.min_members_to_start, islands.lockstep, islands.outlier_factor
    )
    rounds = lines_at(directory.path / ROUNDS, ResumePoint("round", record.round), say)
    driver = Driver(
        member=Member(identity, record, timing, rules, holder, used),
        coordinator=CoordinatorClient(str(islands.lighthouse), islands.own_name, token, timing, session),
        worker=hosts,
        leases=DataLeases(islands.own_name, holder, config.batch.size, used),
        pace=pace,
        token=token,
        report=lambda text, loud: say(f"{'WARNING: ' if loud else ''}{text}"),
        record=rounds.add,
        note_stalled=lambda line: note_stalled(directory, line),
        stop_asked=lambda: stop.signal_name is not None,
        steps=saved.get("steps", 0) if saved else 0,
    )
    status.follow(driver)
    first_message("it answers")
    driver.start()
    return IslandResources(stepper, outer, driver, folder, seen, rounds)


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


def compile_programs(setup: Setup, stepper: Stepper, state: TrainState, outer: HostOuter) -> None:
    """Compile the programs of steps and rounds, so that no island waits for a compiler later; keep the state."""
    island = setup.method
    assert isinstance(island, Island)
    outer.compile()
    stepper.program.lower(state, abstract_batch(setup)).compile()  # cached: the first step finds it
    for index in range(island.schedule.fragments):
        theta, fragment = outer.theta(index), island.fragment(index)
        jax.block_until_ready(island.depart(state.method, theta, fragment))
        jax.block_until_ready(island.norm(state.method, theta, fragment))


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
