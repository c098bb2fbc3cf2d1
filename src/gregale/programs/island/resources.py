"""The parts of an island beside the state of its devices."""

from collections.abc import Callable
from dataclasses import dataclass

from gregale.errors import UserError
from gregale.islands.driver import Driver
from gregale.islands.follower import Follower
from gregale.methods.island_outer import HostOuter
from gregale.storage import StoragePath
from gregale.storage.jsonl_writer import FileJsonlWriter, ObjectJsonlWriter
from gregale.training.stepper import Stepper


@dataclass(frozen=True)
class IslandResources:
    """The parts of an island beside the state of its devices.

    - `step`: takes the inner steps; its program is compiled
    - `outer`: theta and the outer optimizer, in host memory
    - `controller`: the driver on host 0, a follower on each other host; both give the same commands and batches
    - `folder`: the folder of the outer checkpoints
    - `seen`: tokens by fragment since the island last contributed to it, at the start
    - `rounds`: the writer of rounds.jsonl; None: another host of this island writes it
    """

    step: Stepper
    outer: HostOuter
    controller: Driver | Follower
    folder: StoragePath
    seen: list[float]
    rounds: FileJsonlWriter | ObjectJsonlWriter | None = None

    def flush(self) -> None:
        """Write the buffered rounds; raise `StoreError` if a store does not accept them."""
        if self.rounds is not None:
            self.rounds.flush()

    def close(self, report: Callable[[str], None]) -> None:
        """Leave the fleet, and write the remaining rounds: neither a full disk nor an unreachable store ends a run."""
        self.controller.close()
        try:
            if self.rounds is not None:
                self.rounds.close()
        except UserError as error:
            report(str(error))
