"""What a simulated run came to."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recovery:
    """Seconds from a death to something. `open`: deaths after which it had not happened when the run ended."""

    mean_seconds: float | None
    percentile_95_seconds: float | None
    open: int

    @classmethod
    def of(cls, seconds: Sequence[float], open: int) -> "Recovery":
        """Of the times that were seen; None for both figures where there were none."""
        if not seconds:
            return cls(None, None, open)
        ordered = sorted(seconds)
        place = -(-95 * len(ordered) // 100) - 1  # the nearest rank
        return cls(sum(ordered) / len(ordered), ordered[place], open)


@dataclass(frozen=True)
class Outcome:
    """Shares are of elapsed seconds x islands.

    - `goodput`: inner steps that came into the model, each at its island's own step time
    - `tokens`: tokens a second, relative to the sum of all islands if none waits or fails
    - `lost`: steps that died with their island, or were made again
    - `down`: dead, until the process is there again
    - `joining`: until it has a state to train on
    - `waiting`: for others
    - `deaths`: in the run
    """

    seconds: float
    deaths: int
    goodput: float
    tokens: float
    lost: float
    down: float
    joining: float
    waiting: float


@dataclass(frozen=True)
class IslandsOutcome(Outcome):
    """Of islands, with what only they have.

    - `rounds`: committed
    - `failed_reduces`: a member died in them; their bytes count
    - `repeated_reduces`: made again, since members had come too late for the first one; both count
    - `bytes_per_round`: that an island sends in a round
    - `state_bytes`: fetched by all joiners together
    - `generations`: turned in the run
    - `rejoin`: from a death to the next contribution of that island
    - `commit`: from a death to the next commit of the others
    """

    rounds: int = 0
    failed_reduces: int = 0
    repeated_reduces: int = 0
    bytes_per_round: float = 0.0
    state_bytes: float = 0.0
    generations: int = 0
    rejoin: Recovery = field(default_factory=lambda: Recovery(None, None, 0))
    commit: Recovery = field(default_factory=lambda: Recovery(None, None, 0))
