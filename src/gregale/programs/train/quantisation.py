"""What quantised averages lose, measured in a program of its own beside the held-out loss."""

from __future__ import annotations

import jax

from gregale.data.examples import MORE_BYTES, Examples
from gregale.methods.method import Lossy
from gregale.programs.run.batches import GlobalBatches
from gregale.programs.run.setup import Setup
from gregale.training.state import TrainState


class QuantisationFigures:
    """Measures the configured method's first leg; compiled once.

    - `held_out`: its first batch is what gradients are taken of
    """

    def __init__(self, setup: Setup, held_out: Examples):
        assert isinstance(setup.method, Lossy), "`reduce.measure` is refused elsewhere"
        self._setup, self._held_out = setup, held_out
        self._lost = jax.jit(
            setup.method.lost,
            out_shardings=setup.layout.sharding((), {}),
            compiler_options=setup.compiler_options,
        )

    def __call__(self, state: TrainState) -> dict[str, float]:
        """`quantisation_error`: what a message lacks, relative to its values; `feedback_norm`: what is kept."""
        with GlobalBatches(self._held_out, self._setup.batch_axes, self._setup.layout) as batches:
            batch = {key: array for key, array in next(iter(batches)).items() if key != MORE_BYTES}
            lost = self._lost(state.method, batch)
        return {"quantisation_error": float(lost.relative_error), "feedback_norm": float(lost.error_norm)}
