"""What the stages of an island change in one process, while the fleet's rounds go on."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, repeat
from typing import Any

import jax

from gregale.data.mixtures import Mixtures, with_mixture
from gregale.data.preparation import Corpus
from gregale.distributed.rendezvous import ABSENT, difference, format_term, from_text, to_text
from gregale.errors import UserError
from gregale.islands.protocol.ledger import digest_of
from gregale.islands.protocol.settings import timing_of
from gregale.islands.protocol.wire import Columns, unpack
from gregale.islands.stages import fleet_mixtures
from gregale.methods.island import Island
from gregale.programs.plan.estimates import abstract_batch
from gregale.programs.runtime.memory import check_program
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.trained_model import Base, spike_window
from gregale.programs.train.loop import Steps
from gregale.programs.train.resume import Start, converted
from gregale.programs.train.stages import OF_A_STEP, OF_AN_EVALUATION, PreparedStage
from gregale.programs.train.step_log import DataPosition, Traffic
from gregale.runs.config import TrainConfig
from gregale.runs.process_agreement import data_terms, is_trained_on, matches, terms_of
from gregale.training.state import TrainState, state_shardings

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
    stages: Sequence[tuple[TrainConfig, Corpus]], rounds: Sequence[int], shards: Sequence[str], base: Base | None = None
) -> str:
    """Return the settings and text that all islands must share, for an island's header.

    - `stages`: the configuration and the text of each stage; of a later one the terms have what it changes
    - `rounds`: after how many rounds each stage but the first begins
    - `shards`: `shards_of` of each of the island's hosts
    """
    frozen = {} if base is None else {"the digest of the frozen weights": base.digest}
    hosts = {"the number of an island's hosts": str(len(shards))}
    heartbeat = timing_of(stages[0][0].islands).heartbeat_seconds
    seconds = {"islands.heartbeat_seconds": format_term(heartbeat)}
    if (coordinators := len(stages[0][0].islands.coordinators)) > 1:
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


def check_mixtures(config: TrainConfig, number: int, mixtures: Mixtures) -> None:
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
    yield from zip(repeat(OF_A_STEP), stage.stepper(island).compilations(state, abstract_batch(setup), [1]))
    yield from zip(repeat("a round"), island.compilations(state.method))
    yield from zip(repeat(OF_AN_EVALUATION), stage.evaluations(island, range(1, setup.config.steps + 1)))
