"""Taking steps: the compiled programs of a method, and which of them runs when."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from gregale.methods.method import Method
from gregale.model.config import CompilerOptions
from gregale.training.state import StepReport, TrainState, abstract_state, counted_step, state_shardings

Tree = Any


class Stepper:
    """Takes the steps of a method, each with what the method does in it; programs are compiled when first needed.

    One program for each kind of step: fragments of one size share theirs.

    - `method`: the method
    - `model`: its model, abstract or not
    - `options`: the compiler's, see `gregale.training.compiler_options`
    """

    def __init__(self, method: Method, model: Tree, options: CompilerOptions | None = None):
        self._method = method
        shardings = state_shardings(method, abstract_state(method, model))
        compiled = partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)
        self.program = compiled(partial(counted_step, method))
        self.synchronise = compiled(self._after)

    def __call__(self, state: TrainState, batch: Tree, step: int) -> tuple[TrainState, StepReport]:
        """Takes step number `step` (from 1); the state that comes in is donated."""
        actions = self._method.actions(step)
        state, report = self.program(state, batch, *actions.during)
        if actions.after is not None:
            state, outer = self.synchronise(state, actions.after)
            report = report._replace(metrics=report.metrics._replace(outer=outer))
        return state, report

    def _after(self, state: TrainState, after: Any) -> tuple[TrainState, Any]:
        moved, outer = self._method.synchronise(state.method, after)
        return state._replace(method=moved), outer
