"""Provides the checks of a run whose sequences are shared by the devices of `mesh.context`."""

from gregale.axes.layout import CONTEXT, Layout
from gregale.errors import UserError, multiples_near
from gregale.runs.config import TrainConfig


def check_context(config: TrainConfig, layout: Layout) -> None:
    """Raise `UserError` for a run whose sequences cannot be split over `mesh.context`."""
    if (devices := layout.mesh.shape[CONTEXT]) == 1:
        return
    kind = config.model.get_choice_name(type(config.model))
    lengths = [("batch.sequence_length", config.batch.sequence_length)]
    lengths += [("evaluation.sequence_lengths", length) for length in config.evaluation.sequence_lengths]
    for key, length in [each for each in lengths if each[1] % (2 * devices)]:
        raise UserError(
            f"{key} is {length}: mesh.context {devices} cuts a sequence into 2 x {devices} = "
            f"{2 * devices} chunks, and {length} / {2 * devices} = {length / (2 * devices):.4g} is not a whole number "
            f"of tokens. {key} {multiples_near(length, 2 * devices)} would work."
        )
    if not config.model.splits_positions:
        reason = f"model.type is {kind}, whose loss does not know the order of split positions (splits_positions)"
    elif config.pipeline is not None:
        reason = "there is a pipeline, whose stages hold whole sequences"
    else:
        reason = None
    if reason is not None:
        raise UserError(
            f"mesh.context is {devices}, but {reason}. Set mesh.context to 1; to save memory, give its devices to "
            "mesh.data or mesh.model."
        )
