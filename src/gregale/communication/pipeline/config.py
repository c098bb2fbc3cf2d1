"""The pipeline's configuration, and the execution that runs a model's stack of layers through it."""

from dataclasses import dataclass, replace
from typing import Any

from haliax import NamedArray

from gregale.communication.pipeline.schedule import Schedule
from gregale.communication.pipeline.stack import Pipeline, pipelined
from gregale.communication.pipeline.stage import STAGE
from gregale.communication.pipeline.window import GATHER_LEVELS
from gregale.model.adapters import factors_or_all
from gregale.model.execution import PROJECTIONS, Execution, LayerFunction
from gregale.model.kernels.operations import ATTENTION_NAME
from gregale.settings import Settings, setting, whole

# The values, by the layer's names, that an iteration keeps for the backward pass beside the stages' inputs.
# `attention` is the older name of `context`.
SAVED: dict[str, tuple[str, ...]] = {
    "full": (),
    "context": (ATTENTION_NAME,),
    "attention": (ATTENTION_NAME,),
    "projections": tuple(PROJECTIONS),
}


@dataclass(frozen=True)
class PipelineConfig(Settings):
    """The pipeline of layers over the mesh axis `stage`; it changes the model's results only by rounding."""

    repeats: int = setting(1, "passes of a microbatch", range=whole(1, 100_000))
    microbatches: int | None = setting(None, "in it at a time; null: as few as possible", range=whole(1))
    delay_forwarding: bool = setting(False, "hand on an iteration later, behind compute")
    gather: str = setting("per_repeat", "when weights are gathered", choices=GATHER_LEVELS)
    remat: str = setting("full", "saved by name", choices=tuple(SAVED))

    def schedule(self, stages: int) -> Schedule:
        """Return the schedule for a number of stages; raise `UserError` if the numbers do not fit together."""
        forwarding = 2 if self.delay_forwarding else 1
        microbatches = forwarding * stages if self.microbatches is None else self.microbatches
        return Schedule(stages, microbatches, self.repeats, forwarding)


def pipelined_execution(config: PipelineConfig, execution: Execution) -> Execution:
    """Return the execution that runs a model's stack of layers through the pipeline, otherwise unchanged."""
    layout = execution.layout
    schedule = config.schedule(layout.mesh.shape[STAGE])
    pipeline = Pipeline(schedule, layout, config.gather, SAVED[config.remat], execution.dtype, factors_or_all)
    execution = replace(execution, splits_stream=False)
    inside = replace(execution, layout=pipeline.inside, weights_ready=True)

    def stack(block: LayerFunction, x: NamedArray, weights: Any, rows: Any) -> tuple[NamedArray, Any]:
        return pipelined(lambda x, weights, rows: block(x, weights, rows, inside), weights, x, rows, pipeline)

    return replace(execution, stack=stack)
