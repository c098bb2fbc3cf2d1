"""The checkpoints of an island: the outer state of its fleet's rounds, and its own inner state."""

import math
import time

from gregale.checkpoint.files import not_finite
from gregale.checkpoint.multihost import first_message
from gregale.checkpoint.store import Checkpoints
from gregale.data.preparation import Corpus
from gregale.distributed.liveness import Elapsed
from gregale.errors import UserError
from gregale.islands import outer_checkpoint
from gregale.islands.trainer_command import RoundPacing
from gregale.programs.island.steps import IslandResources, IslandSteps
from gregale.programs.runtime.setup import Setup
from gregale.programs.train.loop import Saving
from gregale.programs.train.step_log import DataPosition, Observers, Traffic
from gregale.storage import StoreError
from gregale.tracking.callback import Metrics, Pause


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

    def after_step(self, pause: Pause) -> Metrics:
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
            outer_checkpoint.keep_only(resources.folder, rounds_of(self._checkpoints) | {outer.round})
            leaves, own_leaves = resources.outer.leaves(moment), resources.outer.own_leaves(moment)
            outer_checkpoint.write(resources.folder, outer, leaves, own_leaves)
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
