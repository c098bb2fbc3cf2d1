"""Provides `set_up`, which builds the setup of a run, with its experts gathered or exchanged over `data`.

`mapping.compute.experts: auto` exchanges rows if that sends less than a quarter of the bytes of gathers: these travel
behind products, over all links of a chip, and an exchange does not (Qwen3 30B-A3B on v5e: the same time at 1 / 3.6).
The bytes follow from the configuration and the mesh alone, so that all commands choose alike.

    gathered:   each matrix in the forward and in the backward pass of a microbatch, and its gradient
    exchanged:  a row there and its output back, then row and gradient there, and the gradient back
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import Mesh

from gregale.axes.layout import EMBED, EXCHANGED, EXPERTS, is_layers, named_arrays
from gregale.axes.parameters import rows_to_a_device
from gregale.communication.reduce import rows_per_part
from gregale.errors import UserError
from gregale.model.config import DTYPES
from gregale.programs.runtime.setup import Setup, placed
from gregale.runs.config import TrainConfig

ROW_TRANSFERS, MATRIX_TRANSFERS = 5, 3  # in a microbatch
EXPOSED = 4  # bytes of a gather that take as long as one of an exchange


@dataclass(frozen=True)
class ExpertPlacement:
    """A device's bytes of each place in a step, of an exchange in one round; `refused`: why experts stay gathered."""

    gathered: int
    exchanged: int | None
    refused: str | None = None

    @property
    def exchanges(self) -> bool:
        return self.exchanged is not None and EXPOSED * self.exchanged < self.gathered


def choice_of(gathered: Setup, exchanged: Setup | UserError) -> ExpertPlacement:
    """Return the choice between two setups."""
    own = gathered_bytes(gathered)
    if isinstance(exchanged, UserError):
        return ExpertPlacement(own, None, str(exchanged))
    return ExpertPlacement(own, exchanged_bytes(exchanged))


def gathered_bytes(setup: Setup) -> int:
    """Return the bytes that a device sends in a step to gather all matrices of experts, and to sum their gradients."""
    layout, found = setup.method.step_layout, 0.0
    for weight in matrices_of(setup):
        stored, used = (layout.devices(weight.axes, mapping) for mapping in (layout.params, layout.compute))
        found += weight.size // used * (1 - used / stored)
    return int(MATRIX_TRANSFERS * setup.config.batch.microbatches * width_of(setup) * found)


def exchanged_bytes(setup: Setup) -> int:
    """Return the bytes that a device sends in a step to exchange the rows of all layers with experts, in one round."""
    config, layout, matrices = setup.config, setup.method.step_layout, matrices_of(setup)
    experts, batch = config.model.experts, config.batch
    if experts is None or not matrices:
        return 0
    embed = next(axis.size for axis in matrices[0].axes if axis.name == EMBED)
    devices = layout.devices((matrices[0].resolve_axis(EXPERTS),), layout.compute)
    tokens = rows_per_part(batch.size, setup.layout, batch.microbatches) * batch.sequence_length // layout.context
    rows = devices * rows_to_a_device(tokens * experts.active, devices)
    sent = ROW_TRANSFERS * width_of(setup) * embed * rows * (devices - 1) // devices
    return sent * batch.microbatches * layers_of(matrices)


def matrices_of(setup: Setup) -> list[NamedArray]:
    return [each for each in named_arrays(setup.model) if EXPERTS in each.axis_names]


def layers_of(matrices: list[NamedArray]) -> int:
    """Return the number of layers with experts, in all stacks."""
    return sum({axis.name: axis.size for each in matrices for axis in each.axes if is_layers(axis.name)}.values())


def width_of(setup: Setup) -> int:
    return jnp.dtype(DTYPES[setup.config.compute.dtype]).itemsize


def set_up(config: TrainConfig, tokens: int, mesh: Mesh | None = None) -> Setup:
    """Return the setup of a configuration, without allocation or compilation.

    - `tokens`: the tokenizer's vocabulary size
    - `mesh`: default: the configured mesh on all devices

    Raises `UserError` for values that contradict one another.
    """
    if config.mapping.leaves_experts_open:
        gathered, exchanged = in_places(config, tokens, mesh)
        if isinstance(exchanged, Setup) and choice_of(gathered, exchanged).exchanges:
            return exchanged
        return gathered
    return placed(config, tokens, mesh)


def in_places(config: TrainConfig, tokens: int, mesh: Mesh | None) -> tuple[Setup, Setup | UserError]:
    """Return the setups of a configuration with its experts gathered and exchanged; for the second perhaps an error."""

    def one(place: str | None) -> Setup:
        mapping = replace(config.mapping, compute={**config.mapping.compute, EXPERTS: place})
        return replace(placed(replace(config, mapping=mapping), tokens, mesh), config=config)

    gathered = one(None)
    try:
        return gathered, one(EXCHANGED)
    except UserError as error:
        return gathered, error
