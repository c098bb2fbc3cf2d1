"""What a run has read of its data, also when its batches had another size before."""

from __future__ import annotations

from dataclasses import dataclass

from gregale.services.config import BatchConfig


@dataclass(frozen=True)
class Consumed:
    """Counts examples and tokens, from where the run goes on.

    - `first_step`: steps done before
    - `examples_before`: examples that they have seen, whatever the size of their batches; the next step begins there
    """

    batch: BatchConfig
    first_step: int = 0
    examples_before: int = 0

    def examples(self, step: int) -> int:
        """Examples that the first `step` steps of the run have seen."""
        return self.examples_before + (step - self.first_step) * self.batch.size

    def tokens(self, step: int) -> int:
        """Tokens that the first `step` steps of the run have seen; a run never changes its sequence length."""
        return self.examples(step) * self.batch.sequence_length
