"""What a checkpoint needs of the place where it lies; `disk` and `objects` have one for each kind of place."""

from __future__ import annotations

from typing import Protocol

import jax

from gregale.services.checkpoint.manifest import FileRecords

Structs = dict[str, jax.ShapeDtypeStruct | jax.Array]


class Shelf(Protocol):
    """A folder of checkpoints. Of a save, these calls come one after the other, for one step at a time:

    `begin`, `take`, `finish` and `record` in every process, then `publish` (or `clear`) in process 0.
    """

    def steps(self) -> list[int]:
        """The steps with a committed checkpoint (sound or not), in ascending order."""
        ...

    def without_manifest(self) -> list[int]:
        """The steps of which there are objects but no manifest, in ascending order: their checkpoints do not count."""
        ...

    def begin(self, step: int, texts: dict[str, str], size: int) -> None:
        """Removes what a killed process left unfinished, and makes room for `texts` by name and `size` bytes."""
        ...

    def take(self, step: int, arrays: dict[str, jax.Array]) -> None:
        """Begins to write this process's share in the background; the arrays may be donated as soon as it returns."""
        ...

    def finish(self) -> None:
        """Waits until this process's share is written."""
        ...

    def record(self, step: int) -> FileRecords:
        """The checksums of what this process wrote, which process 0 gets too."""
        ...

    def publish(self, step: int, records: FileRecords) -> None:
        """With the checksums of all processes the checkpoint counts from here on, in the place of an earlier one."""
        ...

    def clear(self, step: int) -> None:
        """Frees the room that a failed save takes, now or at the next one's `begin`."""
        ...

    def delete(self, step: int) -> None:
        """Deletes a committed checkpoint, which is there in full or does not count."""
        ...

    def read(self, step: int, name: str) -> bytes:
        """One of the texts of a committed checkpoint."""
        ...

    def arrays(self, step: int, structs: Structs) -> dict[str, jax.Array]:
        """Some arrays of a committed checkpoint, under the shardings that are asked for; none of them is empty."""
        ...

    def damage(self, step: int, part: int, parts: int) -> str | None:
        """As `manifest.find_damage`."""
        ...

    def close(self, has_failed: bool) -> None:
        """Frees the threads; `has_failed`: whether the last save did."""
        ...
