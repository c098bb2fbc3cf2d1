"""Provides the numbers of a pipeline for the closed forms of its memory and traffic."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineShape:
    """A pipeline of the layers by its numbers.

    - `microbatches`: M, the number in the pipeline at one time.
    - `repeats`: R, the number of times that each microbatch passes all stages.
    - `iterations`: T, the iterations of a pass.
    - `gather`: frequency of weight gathers: `per_repeat`, `per_iteration` or `once`.
    """

    microbatches: int
    repeats: int
    iterations: int
    gather: str

    @property
    def drain(self) -> int:
        """Return the iterations in which a stage idles."""
        return self.iterations - self.microbatches * self.repeats
