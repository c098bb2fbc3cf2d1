"""`Stepper`, which runs the compiled programs of a method in each step."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax

from gregale.methods.method import Method
from gregale.model.config import CompilerOptions
from gregale.training.state import StepReport, TrainState, abstract_state, counted_step, state_shardings

Tree = Any


class Stepper:
    """Runs the steps of a method with the method's actions; compiles each program at its first use.

    There is one program for each kind of step: fragments of equal size share a program.

    - `method`: the method
    - `model`: its model, abstract or not
    - `options`: compiler options, see `gregale.training.compiler_options`
    """

    def __init__(self, method: Method, model: Tree, options: CompilerOptions | None = None):
        self._method = method
        shardings = state_shardings(method, abstract_state(method, model))
        compiled = partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)
        self.program = compiled(partial(counted_step, method))
        self.synchronise = compiled(self._after)

    def __call__(self, state: TrainState, batch: Tree, step: int) -> tuple[TrainState, StepReport]:
        """Run step number `step` (from 1); `state` is donated."""
        actions = self._method.actions(step)
        state, report = self.program(state, batch, *actions.during)
        if actions.after is not None:
            state, outer = self.synchronise(state, actions.after)
            report = report._replace(metrics=report.metrics._replace(outer=outer))
        return state, report

    def compilations(self, state: TrainState, batch: Tree, steps: Sequence[int]) -> Iterator[Callable[[], Any]]:
        """Yield functions that compile the programs of some steps, which later calls with such arrays use.

        - `state`, `batch`: `jax.ShapeDtypeStruct`s with the shardings of the arrays
        """
        found = set()
        for step in steps:
            actions = self._method.actions(step)
            calls = [(self.program, (batch, *actions.during))]
            calls += [] if actions.after is None else [(self.synchronise, (actions.after,))]
            for program, arguments in calls:
                leaves, structure = jax.tree.flatten(arguments)
                key = program, structure, *map(jax.typeof, leaves)
                if key not in found:
                    found.add(key)
                    yield lambda program=program, arguments=arguments: program.lower(state, *arguments).compile()

    def _after(self, state: TrainState, after: Any) -> tuple[TrainState, Any]:
        updated, outer = self._method.synchronise(state.method, after)
        return state._replace(method=updated), outer
