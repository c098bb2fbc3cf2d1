"""Provides the bytes that training sends over each mesh axis, in closed form from shapes and mappings alone.

It covers a PSDP step, a step of DiLoCo's replicas, and the SEND and APPLY that join them. Bytes count as in the audit:
on one device, the full array of each collective once, times its executions in a step. A mesh axis of size 1 carries no
traffic.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import prod

from haliax import NamedArray

from gregale.audit.adapter_traffic import gradient_in_parts, sums_of_factors
from gregale.audit.context_traffic import keys_and_values
from gregale.audit.expert_traffic import exchanges, sent_forward, sums_of_experts, sums_of_loads
from gregale.audit.preference_traffic import log_likelihoods
from gregale.audit.step import (
    Backend,
    ParameterShape,
    StepShape,
    in_eight_bits,
    is_of_experts,
    is_of_router,
    is_stacked,
    layers_of,
    values,
)
from gregale.audit.transfer import Transfer, bytes_by_part
from gregale.axes.layout import CONTEXT, EMBED, REPLICA, ROUTER, Layout, is_layers

STAGE, DATA, MODEL = "stage", "data", "model"
# Mesh axes that split tokens and parameters inside a replica; layers have stages of their own.
SHARDS = (STAGE, CONTEXT, DATA)
INTEGER, FLOAT32 = 4, 4
SOFTMAX_NUMBERS = 3  # a token's largest logit, sum of exponentials and logit of the target
# The backward pass recomputes the attention's output projection.
RECOMPUTED_SUMS = {"full", "context", "context_offload", "attention", "offload"}


def expected_transfers(
    step: StepShape, backend: Backend, averages: list[Transfer] | None = None, stack: list[Transfer] | None = None
) -> list[Transfer]:
    """Return all transfers of one step; of DiLoCo, if the layout is that of one replica.

    - `averages`: transfers of gradient averages over replicas, their norm, and gathered updates; None: in float32
    - `stack`: transfers of the stack of layers in all microbatches; None: it is scanned
    """
    found = [*_weights(step, step.single(), backend), *_gradients(step, trained_in(step, step.single()), backend)]
    found += _scanned(step, backend) if stack is None else stack
    found += [*_vocabulary(step, backend), *(_compared(step, backend) if step.reference else _next_token_sums(step))]
    return kept(step, [*found, *(exact_averages(step) if averages is None else averages)])


def _next_token_sums(step: StepShape) -> list[Transfer]:
    """Return the sums of the next-token loss, its z-loss and weight, and of the loads of experts."""
    replicas = (REPLICA,) if REPLICA in step.layout.params else ()
    return [
        Transfer("loss", "all-reduce", SHARDS, FLOAT32 * (1 + step.z_loss), step.microbatches),
        Transfer("z-loss", "all-reduce", replicas, FLOAT32 * step.z_loss),
        *_summed_over_tokens("weight", FLOAT32, step.microbatches),
        *sums_of_loads(step),
    ]


def _compared(step: StepShape, backend: Backend) -> list[Transfer]:
    """Return the transfers of the forward pass with which a loss compares, and of the loss's sums."""
    forward, times = replace(step, remat="none"), step.microbatches
    norms = head_norm_sums(forward) // 2 * FLOAT32 * step.tokens
    return [
        *([] if step.per_step and step.adapts else _weights(forward, list(step.reference), backend)),
        *_activations(step, backend, 2, 2, times * step.layers),
        *_activations(step, backend, 1 - step.adapts, 1, times),
        *keys_and_values(forward, backend, compares=True),
        *sent_forward(step, backend, activation_bytes(step, backend)),
        Transfer("norms over heads", "all-reduce", (MODEL,), norms, times * step.layers),
        *log_likelihoods(step, activation_bytes(step, backend)),
    ]


def _scanned(step: StepShape, backend: Backend) -> list[Transfer]:
    """Return the transfers of a stack of layers that each microbatch scans."""
    weights, layers = step.stacked(), step.microbatches * step.layers
    recomputes = step.remat in RECOMPUTED_SUMS
    return [
        *_weights(step, weights, backend),
        *_gradients(step, trained_in(step, weights), backend),
        *_activations(step, backend, sums_of_a_layer(step, backend), gathers_of_a_layer(step), layers),
        *keys_and_values(step, backend),
        *sums_of_factors(step, backend),
        Transfer("norms over heads", "all-reduce", (MODEL,), head_norm_sums(step) * FLOAT32 * step.tokens, layers),
        *sums_of_experts(step, backend, activation_bytes(step, backend), recomputes),
        *exchanges(step, backend, recomputes),
    ]


def _activations(step: StepShape, backend: Backend, sums: int, gathers: int, times: int) -> list[Transfer]:
    """Return sums of activations over `model`, and gathers of them; with `splits_stream` the sums are scattered."""
    kind = "reduce-scatter" if step.splits_stream and backend.scatters_layers else "all-reduce"
    size = activation_bytes(step, backend)
    return [
        Transfer("activations", kind, (MODEL,), sums * size, times),
        Transfer("activations", "all-gather", (MODEL,), gathers * size * step.splits_stream, times),
    ]


def send_transfers(step: ParameterShape, axis: str) -> list[Transfer]:
    """Return the transfers of DiLoCo's SEND: the average over `axis`, and the metrics of the pseudo-gradient.

    - `step`: has the weights of the fragment, and the layout of the outer parameters
    """
    weight = Transfer("tokens seen", "all-reduce", (axis,), FLOAT32)
    return kept(step, [*reduced(step, axis), weight, *squared_norms(step.weights, step.layout), *agreement(step, axis)])


def apply_transfers(step: ParameterShape) -> list[Transfer]:
    """Return the transfers of DiLoCo's APPLY, the gathers of outer parameters; `step` as for `send_transfers`."""
    return kept(step, gathers(step))


def kept(step: ParameterShape, transfers: list[Transfer]) -> list[Transfer]:
    """Return the transfers without empty ones and without mesh axes of size 1."""
    large = {axis for axis, size in step.mesh.items() if size > 1}
    found = [replace(each, axes=tuple(axis for axis in each.axes if axis in large)) for each in transfers]
    return [each for each in found if each.axes and each.bytes and each.times]


def bytes_by_axes(transfers: Iterable[Transfer]) -> dict[tuple[str, ...], int]:
    """Return the bytes of a step for each set of mesh axes."""
    sums: dict[tuple[str, ...], int] = {}
    for transfer in transfers:
        sums[transfer.axes] = sums.get(transfer.axes, 0) + transfer.bytes * transfer.times
    return sums


def trained_in(step: StepShape, weights: list[NamedArray]) -> list[NamedArray]:
    """Return those of some weights that have gradients."""
    return [each for each in weights if any(each is other for other in step.weights)]


def _per_execution(step: StepShape, weight: NamedArray) -> int:
    """Return the number of gathered values on a device of a weight, or of one layer of it."""
    whole = step.on_device(weight, step.layout.compute)
    return whole // layers_of(weight)


def _weights(step: StepShape, weights: list[NamedArray], backend: Backend) -> list[Transfer]:
    """Return the gathers of weights over `data`, in the forward pass and in the recomputation of a layer."""
    width = max(step.compute_bytes, backend.narrowest_bytes)
    passes = 1 if step.remat == "none" else 2
    found = []
    for weight in weights:
        own = step.split_by(weight, step.layout.compute)
        over = tuple(axis for axis in SHARDS if axis in step.split_by(weight, step.layout.params) and axis not in own)
        if not over:
            continue
        held, is_adapter = step.format_of(weight), step.adapts and bool(trained_in(step, [weight]))
        eight_bits = in_eight_bits(weight, step.matmul) and not step.per_step and held is None and not is_adapter
        once = step.per_step or (step.unrolled and backend.hoists_gathers)
        if once and is_stacked(weight):
            # Each layer's recomputation has gathers of its own, which the compiler hoists too.
            size, times = step.on_device(weight, step.layout.compute), 1 if step.per_step else passes
        elif is_stacked(weight):
            size, times = _per_execution(step, weight), passes * step.microbatches * layers_of(weight)
        else:
            size, times = _per_execution(step, weight), 1 if once or backend.hoists_gathers else step.microbatches
            times *= 1 if step.per_step else step.uses(weight)
        if held is not None:
            parts = bytes_by_part(held, size, backend.narrowest_bytes).items()
            found += [Transfer(part, "all-gather", over, count, times) for part, count in parts]
            continue
        found.append(Transfer("weights", "all-gather", over, size * (1 if eight_bits else width), times))
        if eight_bits:
            found.append(_scales(step, weight, over, times * (layers_of(weight) if once else 1)))
    return found


def _scales(step: StepShape, weight: NamedArray, over: tuple[str, ...], times: int) -> Transfer:
    """Return the transfer of the scales of a weight in 8 bits: of their maximum, if `embed` is among its inputs."""
    experts = is_of_experts(weight)
    inputs, last = weight.axes[2 if experts else 1], weight.axes[-1]
    size = _per_execution(step, weight) * step.layout.devices((inputs,), step.layout.compute) // inputs.size
    if inputs.name == EMBED:
        return Transfer("scales", "all-reduce", over, size * FLOAT32, times)
    return Transfer("scales", "all-gather", over, (size if experts else last.size) * FLOAT32, times)


def _gradients(step: StepShape, weights: list[NamedArray], backend: Backend) -> list[Transfer]:
    """Return the sums of gradients over `data` in each microbatch."""
    width = max(step.compute_bytes, backend.narrowest_bytes)
    found = []
    for weight in weights:
        matrix = len(step.split_by(weight, step.layout.params)) > 0 and len(weight.axes) > 1
        table = not is_stacked(weight) and matrix
        kind = "reduce-scatter" if table or (matrix and backend.scatters_layers) else "all-reduce"
        times = step.microbatches * layers_of(weight)
        size = _per_execution(step, weight) * width
        vector = sum(not is_layers(axis.name) for axis in weight.axes) == 1
        stored, own = (step.split_by(weight, of) for of in (step.layout.params, step.layout.compute))
        if is_of_experts(weight) and not {*SHARDS} & ({*stored} - {*own}):
            summed_over = tuple(axis for axis in SHARDS if axis not in own)
            found.append(Transfer("gradients", "all-reduce", summed_over, size, times))
        elif table or is_of_experts(weight) or is_of_router(weight):
            found += _scattered(step, weight, size, times * step.uses(weight))
        elif vector and step.splits_stream and any(axis.name == "embed" for axis in weight.axes):
            found += _summed_over_tokens("gradients", size // width * FLOAT32, times, (CONTEXT, MODEL))
        elif vector and kind == "all-reduce":
            found += _summed_over_tokens("gradients", size, times)
        elif parts := gradient_in_parts(step, weight, size, times):
            found += parts
        else:
            found.append(Transfer("gradients", kind, SHARDS, size, times * step.uses(weight)))
        if not is_on_model(weight):
            # The scale of the heads' norm is on every device of `model`, each of which has some of the heads.
            found.append(Transfer("gradients", kind, (MODEL,), size, times))
    return found


def _summed_over_tokens(purpose: str, size: int, times: int, positions: tuple[str, ...] = (CONTEXT,)) -> list[Transfer]:
    """Return the sums of a vector over rows, and then over `positions`; a product sums over both at once."""
    return [Transfer(purpose, "all-reduce", axes, size, times) for axes in ((STAGE, DATA), positions)]


def _scattered(step: StepShape, weight: NamedArray, size: int, times: int) -> list[Transfer]:
    """Return the sums of a table's gradient over the devices that compute with all of it, which go axis by axis."""
    found, own = [], step.split_by(weight, step.layout.compute)
    for axis in (axis for axis in (CONTEXT, DATA, STAGE) if axis not in own):
        found.append(Transfer("gradients", "reduce-scatter", (axis,), size, times))
        size //= step.mesh[axis]
    return found


ON_EMBED_OR_SPLIT = {"embed", "heads", "kv_heads", "mlp", "vocab", ROUTER}


def is_on_model(weight: NamedArray) -> bool:
    """Return whether each device of `model` has the complete gradient of its weight."""
    return bool({axis.name for axis in weight.axes} & ON_EMBED_OR_SPLIT)


def sums_of_a_layer(step: StepShape, backend: Backend) -> int:
    """Return a layer's number of sums over `model`: activations after each half, and gradients before it."""
    backward = 2 if backend.merges_sums else 5  # query, key, value; gate, up
    recomputed = 0 if step.remat not in RECOMPUTED_SUMS else 2 if step.norms_after else 1
    saved = step.splits_stream and recomputed > 0  # attention's output
    return 2 + recomputed - saved + backward


def gathers_of_a_layer(step: StepShape) -> int:
    """Return a layer's number of gathers over `model`: before each half, and of gradients after it."""
    return 4 if step.remat == "none" else 6


def head_norm_sums(step: StepShape) -> int:
    """Return the numbers that a layer sums over `model` per token: mean squares of queries and keys over all heads."""
    if not step.norms_over_heads:
        return 0
    forward = 1 if step.remat == "none" else 2
    return 2 * (forward + 1)


def activation_bytes(step: StepShape, backend: Backend) -> int:
    """Return the bytes of a microbatch's activations [rows, position, embed] on a device."""
    return step.tokens * step.embed * max(step.compute_bytes, backend.narrowest_bytes)


def _vocabulary(step: StepShape, backend: Backend) -> list[Transfer]:
    """Return the transfers of embeddings, of the loss's three numbers per token and its gradient, and of rows.

    A frozen embedding takes no gradient.
    """
    found, softmax = activation_bytes(step, backend), SOFTMAX_NUMBERS * FLOAT32 * step.loss_blocks.tokens
    over_model = [
        Transfer("loss", "all-reduce", (MODEL,), softmax, step.microbatches),
        *_activations(step, backend, 2, 2 - step.adapts, step.microbatches),
    ]
    if not step.exchanges_rows:
        return over_model
    # With a table that was gathered before, only gradients; of a frozen one, only rows.
    directions = (not step.per_step) + (not step.adapts)
    return [
        *over_model,
        Transfer("tokens", "all-gather", SHARDS, INTEGER * step.tokens * step.shards, step.microbatches),
        Transfer("rows of the embedding", "all-to-all", SHARDS, found, directions * step.microbatches),
    ]


def reduced(step: ParameterShape, axis: str = REPLICA) -> list[Transfer]:
    """Return the reductions of each weight's sums over a slow axis under `opt_state`."""
    if axis not in step.layout.params:
        return []
    found = []
    for weight in step.weights:
        after = step.layout.mesh_axes(weight.axes, step.layout.opt_state)
        kind = "reduce-scatter" if axis in after else "all-reduce"
        split = {*step.layout.mesh_axes(weight.axes, step.layout.params), *after} - {axis}
        found.append(Transfer("sums", kind, (axis,), _shard_bytes(step, weight, split)))
    return found


def gathers(step: ParameterShape) -> list[Transfer]:
    """Return the gathers of each weight's new values from `opt_state` to `params`, axis by axis, the slowest first."""
    found = []
    for weight in step.weights:
        before = step.layout.mesh_axes(weight.axes, step.layout.params)
        split = list(step.layout.mesh_axes(weight.axes, step.layout.opt_state))
        for mesh_axis in [axis for axis in reversed(split) if axis not in before]:
            split.remove(mesh_axis)
            found.append(Transfer("new values", "all-gather", (mesh_axis,), _shard_bytes(step, weight, split)))
    return found


def _shard_bytes(step: ParameterShape, weight: NamedArray, split: Iterable[str]) -> int:
    """Return the bytes of a float32 array on a device if these mesh axes split it."""
    return FLOAT32 * values(weight.axes) // prod(step.mesh[axis] for axis in split)


def exact_averages(step: ParameterShape) -> list[Transfer]:
    """Return the transfers of gradients, loss and weight over replicas, of squared norms, and of updates."""
    found = [*reduced(step), *gathers(step), *squared_norms(step.weights, step.layout)]
    if REPLICA in step.layout.params:
        found.append(Transfer("loss and weight", "all-reduce", (REPLICA,), 2 * FLOAT32))
    return found


def agreement(step: ParameterShape, axis: str) -> list[Transfer]:
    """Return the sums of two products of each replica's pseudo-gradient, over its devices that share a weight."""
    found = []
    for weight in step.weights:
        inside = tuple(each for each in step.split_by(weight, step.layout.opt_state) if each != axis)
        found.append(Transfer("agreement", "all-reduce", inside, 2 * FLOAT32))
    return found


def squared_norms(weights: Iterable[NamedArray], layout: Layout) -> list[Transfer]:
    """Return the sums of squared norms by weight, over the devices that share each of its axes under `opt_state`."""
    over: Counter[tuple[str, ...]] = Counter()
    for weight in weights:
        for part in layout.splits(weight.axes, layout.opt_state):
            over[tuple(axis for axis, size in layout.mesh.shape.items() if axis in part and size > 1)] += FLOAT32
    return [Transfer("norm", "all-reduce", axes, size) for axes, size in over.items()]
