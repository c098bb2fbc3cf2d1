"""The stages of an island: all islands of a fleet begin a stage after the same round."""

from collections.abc import Sequence

from gregale.data.mixtures import Mixtures, with_mixture
from gregale.errors import UserError
from gregale.methods.island import Island
from gregale.methods.island_outer import HostOuter
from gregale.runs.config import TrainConfig


def stage_rounds(config: TrainConfig, islands: Sequence[Island]) -> tuple[int, ...]:
    """Return the number of rounds after which each stage but the first begins.

    The fleet has then made as many rounds as one island makes in the steps before the stage.

    - `islands`: the method of each stage

    Raises `UserError` if a stage has no round, or keeps the outer parameters in other shards.
    """
    schedule, found = islands[0].schedule, [0]
    shards = HostOuter(islands[0]).expected() if len(islands) > 1 else None
    for number, (stage, island) in enumerate(zip(config.each_stage[1:], islands[1:], strict=True)):
        rounds = schedule.rounds(stage.first)
        if not found[-1] < rounds < schedule.rounds(config.steps):
            raise UserError(
                f"stages.{number}.from is step {stage.first:,}, by which the fleet makes {rounds:,} rounds; the stage "
                f"before it begins after {found[-1]:,} of the {schedule.rounds(config.steps):,} rounds of the run. All "
                f"islands begin a stage after the same round, and sync.period {schedule.period} has "
                f"{schedule.fragments}. Give a stage at least one round."
            )
        if HostOuter(island).expected() != shards:
            raise UserError(
                f"stages.{number}.mesh: the outer parameters of an island stay in the shards of the first stage, and "
                "this mesh splits them in another way. Keep the axes that split parameters."
            )
        found.append(rounds)
    return tuple(found[1:])


def fleet_mixtures(config: TrainConfig, firsts: Sequence[int]) -> Mixtures:
    """Return the mixtures of a fleet's examples so far.

    - `firsts`: the first example of each stage that has begun after the first, of the fleet's ledger
    """
    found: Mixtures = ()
    for first, stage in zip([0, *firsts], config.each_stage, strict=False):
        found = with_mixture(found, first, *stage.config.mixture)
    return found
