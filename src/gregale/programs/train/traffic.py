"""What a run has sent over the slow link, also when it was on other meshes before."""

from __future__ import annotations

from dataclasses import dataclass

from gregale.programs.run.setup import Setup


@dataclass(frozen=True)
class Traffic:
    """Counts what a device sends over `replica`, from where the run goes on.

    - `first_step`: steps done before
    - `bytes_before`: bytes that a device had sent then, on whatever meshes and by whatever methods
    """

    setup: Setup
    first_step: int = 0
    bytes_before: int = 0

    def bytes_sent(self, step: int) -> int:
        """Bytes that a device has sent in the first `step` steps of the run."""
        return self.figures(step)["replica_bytes"]

    def figures(self, step: int) -> dict[str, int]:
        """`replica_bytes`: bytes sent so far; for DiLoCo also `steps_since_sync`: steps since the last sending."""
        figures, at_first = self.setup.traffic(step), self.setup.traffic(self.first_step)
        since = figures["replica_bytes"] - at_first["replica_bytes"]
        return {**figures, "replica_bytes": self.bytes_before + since}
