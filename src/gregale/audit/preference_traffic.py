"""Provides the bytes that a loss of log-likelihoods (DPO) sends beside its passes, in closed form."""

from gregale.audit.step import StepShape
from gregale.audit.transfer import Transfer
from gregale.axes.layout import CONTEXT, MODEL, REPLICA

FLOAT32 = 4
METRICS = 4  # of DPO
SUMS_OF_A_ROW = 3  # log-likelihoods by the model and by the reference, and the number of targets
NUMBERS = 3  # a token's largest logit, sum of exponentials and logit of the target


def log_likelihoods(step: StepShape, activations: int) -> list[Transfer]:
    """Return the transfers of both passes' log-likelihoods, of loss and metrics, and of the reference's embedding.

    Devices that share sequences add up each row, so that the sums over pairs are over rows alone. With adapters the
    devices exchange rows of the embedding once for both passes.

    - `activations`: bytes of a microbatch's activations
    """
    block, of_rows = min(step.loss_block, step.tokens), ("stage", "data")
    filled = -(-step.tokens // block) * block
    # The gradients send the numbers again, as those of the next-token loss, but that of the target.
    numbers = FLOAT32 * (2 * NUMBERS * filled - step.loss_blocks.tokens)
    rows = activations * (step.exchanges_rows and not step.adapts and not step.per_step)
    replicas = (REPLICA,) if REPLICA in step.layout.params else ()
    return [
        Transfer("loss", "all-reduce", (MODEL,), numbers, step.microbatches),
        Transfer("rows of the embedding", "all-to-all", ("stage", CONTEXT, "data"), rows, step.microbatches),
        Transfer("rows", "all-reduce", (CONTEXT,), SUMS_OF_A_ROW * FLOAT32 * step.rows_here, step.microbatches),
        Transfer("loss and weight", "all-reduce", of_rows, 2 * FLOAT32, step.microbatches),
        Transfer("metrics", "all-reduce", of_rows, METRICS * FLOAT32, step.microbatches),
        Transfer("metrics", "all-reduce", replicas, METRICS * FLOAT32),
    ]
