"""Provides the log likelihoods of texts under a model, in batches by length on the mesh."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH
from gregale.data.tokenizers import Tokenizer
from gregale.evaluation.tasks import NOTHING, Continuations, filled
from gregale.inference.generate import check_scored, scores
from gregale.model.layers import POSITION
from gregale.programs.runtime.batches import Placement
from gregale.programs.runtime.setup import Setup

MIN_LENGTH = 32  # tokens of a row; lengths are the context, its half, its quarter and so on
IN_FLIGHT = 2  # batches that the devices have before the host waits for the results of the first


class Scored(NamedTuple):
    """Scores of continuations."""

    log_likelihoods: np.ndarray  # sums over the tokens that are scored, nats, float64 [continuation]
    greedy: np.ndarray  # whether each of these tokens is the likeliest, bool [continuation]


class Shape(NamedTuple):
    """Continuations that one compiled program scores.

    - `rows`, `length`: shape of the program's batches
    - `chosen`: the indices of the continuations, int64
    """

    rows: int
    length: int
    chosen: np.ndarray


class Scorer:
    """Scores continuations with a run's model; compiles one program for each of a few lengths.

    Probabilities are over the tokenizer's tokens, or over all rows of an imported model's table. The rows that pad a
    table for the mesh have no probability. Raises `UserError` for a model that cannot score.
    """

    def __init__(self, setup: Setup, tokenizer: Tokenizer):
        self._setup, config = setup, setup.config
        check_scored(setup.model, config.model.get_choice_name(type(config.model)))
        execution = setup.evaluation_execution()
        vocabulary = config.model.vocabulary or tokenizer.vocabulary_size

        def sums(model, batch: dict[str, NamedArray]) -> tuple[jax.Array, jax.Array]:
            found, likeliest = scores(model, batch, vocabulary, execution)
            is_scored = batch["loss_mask"].array > 0
            total = jnp.sum(jnp.where(is_scored, found.array, 0), axis=1)
            return total, jnp.all(likeliest.array | ~is_scored, axis=1)

        self._sums: Callable = jax.jit(
            sums, out_shardings=setup.layout.sharding((), {}), compiler_options=setup.compiler_options
        )

    @property
    def context(self) -> int:
        """Return the maximum number of tokens in an input of the model."""
        return self._setup.config.batch.sequence_length

    def __call__(
        self, model, continuations: Continuations, at_batch: Callable[[int, int], None] = lambda done, total: None
    ) -> Scored:
        """Return the scores of all continuations; all processes of the run make this call and get the result.

        - `at_batch(done, total)`: called for each batch, with counts of continuations
        """
        lengths = continuations.lengths
        found = Scored(np.zeros(len(lengths)), np.zeros(len(lengths), bool))
        done, waiting = 0, deque()

        def take() -> None:
            chosen, results = waiting.popleft()
            for array, result in zip(found, results, strict=True):
                array[chosen] = np.asarray(result)[: len(chosen)]

        for shape in self.shapes(lengths):
            for chosen, batch in self._batches(continuations, shape):
                at_batch(done, len(lengths))
                waiting.append((chosen, self._sums(model, batch)))
                done += len(chosen)
                if len(waiting) > IN_FLIGHT:
                    take()
        while waiting:
            take()
        at_batch(done, len(lengths))
        return found

    def shapes(self, lengths: np.ndarray) -> list[Shape]:
        """Return the programs for these input lengths, the longest first so that a lack of memory shows at once."""
        layout, size = self._setup.layout, self._setup.config.batch.size
        parts = layout.devices((BATCH,), layout.compute)
        sizes = halves(self.context, 1 if layout.context == 1 else 2 * layout.context)
        smallest = len(sizes) - 1 - np.searchsorted(sizes[::-1], np.minimum(lengths, self.context))
        shapes = []
        for number, length in enumerate(sizes):
            chosen = np.flatnonzero(smallest == number)
            if len(chosen):
                rows = min(size * (self.context // length), -(-len(chosen) // parts) * parts)
                shapes.append(Shape(rows, length, chosen))
        return shapes

    def _batches(
        self, continuations: Continuations, shape: Shape
    ) -> Iterator[tuple[np.ndarray, dict[str, NamedArray]]]:
        """Yield the indices of each batch's continuations, and the batch with the rows of this process's devices."""
        placement = Placement((Axis(BATCH, shape.rows), Axis(POSITION, shape.length)), self._setup.layout)
        for first in range(0, len(shape.chosen), shape.rows):
            chosen = shape.chosen[first : first + shape.rows]
            mine = [continuations[chosen[row]] if row < len(chosen) else NOTHING for row in placement.rows]
            yield chosen, placement.placed(placement.part(filled(mine, shape.length)))


def halves(length: int, multiple: int = 1) -> list[int]:
    """Return a length, its half and so on, rounded up to multiples, down to `MIN_LENGTH`."""
    found = [length]
    while MIN_LENGTH <= (half := -(-found[-1] // (2 * multiple)) * multiple) < found[-1]:
        found.append(half)
    return found
