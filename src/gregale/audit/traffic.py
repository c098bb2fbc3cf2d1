"""The bytes that a PSDP step has to send over each mesh axis, in closed form: from shapes and mappings alone.

Bytes are counted as the audit counts them: on one device, the full array of each collective once, times its executions
in a step. A mesh axis of size 1 carries nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from haliax import NamedArray

from gregale.audit.step import Backend, StepShape, is_stacked
from gregale.axes.layout import REPLICA

DATA, MODEL = "data", "model"
FLOAT32 = 4
SOFTMAX_NUMBERS = 3  # a token's largest logit, sum of exponentials and logit of the target
RECOMPUTED_SUMS = {"full": 1, "attention": 1, "offload": 1}  # the attention's output projection runs again


@dataclass(frozen=True)
class Transfer:
    """A collective, or several alike, that the step has to do.

    Attributes:
        purpose: what is sent.
        kind: the collective, as the audit names it.
        axes: mesh axes that it crosses, in mesh order.
        bytes: payload on one device for one execution.
        times: executions in one step.
    """

    purpose: str
    kind: str
    axes: tuple[str, ...]
    bytes: int
    times: int = 1


def expected_transfers(step: StepShape, backend: Backend) -> list[Transfer]:
    """Everything that one step sends."""
    found = [*_weights(step, backend), *_gradients(step, backend), *_tensor_parallel(step, backend)]
    found += [*_vocabulary(step, backend), *_over_replica(step), *_scalars(step)]
    sizes = step.mesh
    kept = []
    for transfer in found:
        axes = tuple(axis for axis in transfer.axes if sizes[axis] > 1)
        if axes and transfer.bytes and transfer.times:
            kept.append(Transfer(transfer.purpose, transfer.kind, axes, transfer.bytes, transfer.times))
    return kept


def bytes_by_axes(transfers: Iterable[Transfer]) -> dict[tuple[str, ...], int]:
    """Bytes of a step for each set of mesh axes."""
    sums: dict[tuple[str, ...], int] = {}
    for transfer in transfers:
        sums[transfer.axes] = sums.get(transfer.axes, 0) + transfer.bytes * transfer.times
    return sums


def sent_bytes(transfer: Transfer, sizes: dict[str, int]) -> float:
    """What one device sends for a transfer in a step, by a ring."""
    members = 1
    for axis in transfer.axes:
        members *= sizes[axis]
    share = (members - 1) / members * (2 if transfer.kind == "all-reduce" else 1)
    return transfer.bytes * transfer.times * share


def _per_execution(step: StepShape, weight: NamedArray) -> int:
    """Values of a weight, or of one layer of it, on a device that has gathered it."""
    whole = step.on_device(weight, step.layout.compute)
    return whole // step.layers if is_stacked(weight) else whole


def _weights(step: StepShape, backend: Backend) -> list[Transfer]:
    """Weights gathered over `data`: in the forward pass, and where a layer is recomputed again in the backward pass."""
    width = max(step.compute_bytes, backend.narrowest_bytes)
    passes = 1 if step.remat == "none" else 2
    found = []
    for weight in step.weights:
        if DATA not in step.split_by(weight, step.layout.params):
            continue
        once = step.per_step or (step.unrolled and backend.hoists_gathers)
        if once and is_stacked(weight):
            size, times = step.on_device(weight, step.layout.compute), 1
        elif is_stacked(weight):
            size, times = _per_execution(step, weight), passes * step.microbatches * step.layers
        else:
            size, times = _per_execution(step, weight), 1 if once or backend.hoists_gathers else step.microbatches
            times *= 1 if step.per_step else _uses(step, weight)
        found.append(Transfer("weights", "all-gather", (DATA,), size * width, times))
    return found


def _gradients(step: StepShape, backend: Backend) -> list[Transfer]:
    """Gradients summed over `data` in every microbatch."""
    width = max(step.compute_bytes, backend.narrowest_bytes)
    found = []
    for weight in step.weights:
        matrix = len(step.split_by(weight, step.layout.params)) > 0 and len(weight.axes) > 1
        table = not is_stacked(weight) and matrix
        kind = "reduce-scatter" if table or (matrix and backend.scatters_layers) else "all-reduce"
        times = step.microbatches * (step.layers if is_stacked(weight) else 1)
        size = _per_execution(step, weight) * width
        found.append(Transfer("gradients", kind, (DATA,), size, times * _uses(step, weight)))
        if not {axis.name for axis in weight.axes} & ON_EMBED_OR_SPLIT:
            # The scale of the heads' norm is on every device of `model`, each of which has some of the heads.
            found.append(Transfer("gradients", kind, (MODEL,), size, times))
    return found


ON_EMBED_OR_SPLIT = {"embed", "heads", "kv_heads", "mlp", "vocab"}


def _uses(step: StepShape, weight: NamedArray) -> int:
    """How often a weight is used in a pass: a table that is the head as well is used twice."""
    tables = sum(axis.name == "vocab" for each in step.weights for axis in each.axes)
    return 2 if tables == 1 and any(axis.name == "vocab" for axis in weight.axes) else 1


def _tensor_parallel(step: StepShape, backend: Backend) -> list[Transfer]:
    """Activations summed over `model`: after each half of a layer, and their gradients before it."""
    width = max(step.compute_bytes, backend.narrowest_bytes)
    backward = 2 if backend.merges_sums else 5  # query, key, value; gate, up
    sums = 2 + RECOMPUTED_SUMS.get(step.remat, 0) + backward
    size = step.tokens * step.embed * width
    return [Transfer("activations", "all-reduce", (MODEL,), sums * size, step.microbatches * step.layers)]


def _vocabulary(step: StepShape, backend: Backend) -> list[Transfer]:
    """Over `model`: the embeddings found, the loss's three numbers a token, and its gradient."""
    width = max(step.compute_bytes, backend.narrowest_bytes)
    block = min(step.loss_block, step.tokens)
    padded = -(-step.tokens // block) * block
    size = 2 * step.tokens * step.embed * width + SOFTMAX_NUMBERS * FLOAT32 * padded
    return [Transfer("embedding and loss", "all-reduce", (MODEL,), size, step.microbatches)]


def _over_replica(step: StepShape) -> list[Transfer]:
    """Once a step: each gradient's shard reduced over `replica`, and the update's gathered."""
    found = []
    for weight in step.weights:
        size = FLOAT32 * step.on_device(weight, step.layout.params)
        if REPLICA in step.layout.mesh_axes(weight.axes, step.layout.opt_state):
            found.append(Transfer("replica gradients", "reduce-scatter", (REPLICA,), size))
            found.append(Transfer("replica updates", "all-gather", (REPLICA,), size))
        else:
            found.append(Transfer("replica gradients", "all-reduce", (REPLICA,), size))
    return found


def _scalars(step: StepShape) -> list[Transfer]:
    """Loss and weight of every microbatch; loss and weight twice over replicas; each gradient's squared norm."""
    over_shards = {}
    for weight in step.weights:
        axes = step.split_by(weight, step.layout.opt_state)
        for part in (tuple(axis for axis in axes if axis == MODEL), tuple(axis for axis in axes if axis != MODEL)):
            over_shards[part] = over_shards.get(part, 0) + FLOAT32
    return [
        Transfer("loss and weight", "all-reduce", (DATA,), 2 * FLOAT32, step.microbatches),
        Transfer("loss and weight", "all-reduce", (REPLICA,), 3 * FLOAT32),
        *(Transfer("gradient norm", "all-reduce", axes, size) for axes, size in over_shards.items()),
    ]
