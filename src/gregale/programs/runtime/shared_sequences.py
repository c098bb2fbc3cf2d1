"""Provides the checks of a run whose sequences are shared by the devices of `mesh.context`."""

from collections.abc import Sequence

from gregale.axes.layout import Layout
from gregale.errors import UserError, multiples_near
from gregale.runs.config import TrainConfig


def check_context(config: TrainConfig, layout: Layout) -> None:
    """Raise `UserError` for a run whose sequences cannot be split over `mesh.context`."""
    devices, model = layout.context, config.model
    if devices == 1:
        return
    _check_lengths("batch.sequence_length", [config.batch.sequence_length], devices)
    _check_lengths("evaluation.sequence_lengths", config.evaluation.sequence_lengths, devices)
    if not model.splits_positions:
        kind = model.get_choice_name(type(model))
        reason = f"model.type is {kind}, whose loss does not know the order of split positions (splits_positions)"
    elif config.pipeline is not None:
        reason = "there is a pipeline, whose stages hold whole sequences"
    else:
        return
    raise UserError(
        f"mesh.context is {devices}, but {reason}. Set mesh.context to 1; to save memory, give its devices to "
        "mesh.data or mesh.model."
    )


def _check_lengths(key: str, lengths: Sequence[int], devices: int) -> None:
    """Raise `UserError` for a length, in tokens, that the devices' chunks do not divide."""
    chunks = 2 * devices
    for length in lengths:
        if length % chunks:
            raise UserError(
                f"{key} is {length}: mesh.context {devices} cuts a sequence into 2 x {devices} = {chunks} chunks, and "
                f"{length} / {chunks} = {length / chunks:.4g} is not a whole number of tokens. {key} "
                f"{multiples_near(length, chunks)} would work."
            )
