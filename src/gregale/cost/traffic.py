"""Provides the bytes that training sends over each mesh axis, in closed form from shapes and mappings alone.

It covers a PSDP step, a step of DiLoCo's replicas, and the SEND and APPLY that join them. Bytes count as in the audit:
on one device, the full array of each collective once, times its executions in a step. A mesh axis of size 1 carries no
traffic. Weights and gradients of experts count as those of other layers.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from haliax import NamedArray

from gregale.axes.layout import CONTEXT, EMBED, LORA_RANK, MODEL, REPLICA, ROUTER, SHARED_GATE, Layout, is_layers
from gregale.codecs.codec import WireFormat
from gregale.cost.estimate import (
    Backend,
    ParameterShape,
    PipelineShape,
    StepShape,
    in_eight_bits,
    is_of_choice,
    is_of_experts,
    is_of_router,
    is_stacked,
    layers_of,
    layers_of_a_stage,
    of_an_iteration,
    values,
)


@dataclass(frozen=True)
class Transfer:
    """A collective, or several equal ones, of a step.

    - `purpose`: name of the payload.
    - `kind`: the collective's name in the audit.
    - `axes`: mesh axes that it crosses, in mesh order.
    - `bytes`: payload on one device for one execution.
    - `times`: executions in one step.
    """

    purpose: str
    kind: str
    axes: tuple[str, ...]
    bytes: int
    times: int = 1


def bytes_by_part(held: WireFormat | None, values: int, width: int) -> dict[str, int]:
    """Return the bytes of values of a weight: of floats of a width, or of codes and of scales of at least this width.

    - `held`: the format of the weight's blocks; None: it is an array of floats
    """
    if held is None:
        return {"weights": values * width}
    return {"weights": values * held.bits // 8, "scales": values // held.block * max(held.scale_bits // 8, width)}


def sent_bytes(transfer: Transfer, sizes: dict[str, int]) -> float:
    """Return the bytes that one device sends for a transfer in a step, in a ring; of a permutation all."""
    if transfer.kind == "collective-permute":
        return transfer.bytes * transfer.times
    devices = prod(sizes[axis] for axis in transfer.axes)
    share = (devices - 1) / devices * (2 if transfer.kind == "all-reduce" else 1)
    return transfer.bytes * transfer.times * share


def sums_of_factors(step: StepShape, backend: Backend) -> list[Transfer]:
    """Return what adapters of scanned layers sum: products over `model`, and keys of dropout over `context`."""
    forward = 1 if step.remat == "none" else 2
    found = [
        Transfer("products with factors", "all-reduce", (MODEL,), size, step.microbatches * layers_of(factor))
        for factor, size in products_with_factors(step, backend, step.tokens, forward)
    ]
    keys = INTEGER * step.rows_here * (step.drops and step.mesh[CONTEXT] > 1)
    return [*found, Transfer("keys of dropout", "all-reduce", (CONTEXT,), keys, step.microbatches)]


def products_with_factors(
    step: StepShape, backend: Backend, tokens: int, forward: int
) -> Iterator[tuple[NamedArray, int]]:
    """Yield each factor with a sum over `model` in products of the width `lora_rank`, and the bytes of it in a layer.

    A factor A whose inputs are split sums x A, and, for dropout, shares its first row. A factor B whose outputs are
    split sums the gradient by x A.

    - `tokens`: of a product on one device
    - `forward`: how often x A is computed: again in the backward pass, which needs it for the gradient of B
    """
    width = max(step.compute_bytes, backend.narrowest_bytes)
    for factor in step.weights if step.adapts else []:
        if MODEL in step.split_by(factor, step.layout.compute):
            is_a = factor.axes[-1].name == LORA_RANK
            rows = forward * (tokens + step.drops) if is_a else tokens
            yield factor, width * rows * factor.resolve_axis(LORA_RANK).size


def gradient_in_parts(step: StepShape, weight: NamedArray, size: int, times: int) -> list[Transfer]:
    """Return the transfers of the gradient of a factor that `model` does not split; none if it is summed as others are.

    If the devices that store parts of the factor divide `model`, the partitioner gives each device of `model` the
    product for one part. Parts are summed axis by axis, and then move to the devices that store them.
    """
    stored = step.split_by(weight, step.layout.params)
    parts = prod(step.mesh[axis] for axis in stored)
    if not step.adapts or MODEL in stored or parts == 1 or step.mesh[MODEL] % parts:
        return []
    sums = [Transfer("gradients", "all-reduce", (axis,), size // parts, times) for axis in SHARDS]
    return [*sums, Transfer("gradients", "collective-permute", (*stored, MODEL), size // parts, times)]


def keys_and_values(step: StepShape, backend: Backend, compares: bool = False) -> list[Transfer]:
    """Return the transfers of keys, values and segments of sequences that devices share, and of their gradients.

    - `compares`: of the forward pass with which a loss compares; it takes segments that were gathered once
    """
    if step.mesh[CONTEXT] == 1:
        return []
    width, layers = max(step.compute_bytes, backend.narrowest_bytes), step.microbatches * step.layers
    passes = 1 if step.remat == "none" else 2
    once = step.microbatches * (not compares) if backend.hoists_gathers else layers
    found = [Transfer("segments", "all-gather", (CONTEXT,), INTEGER * step.rows_here * step.positions, once)]
    for reach, share in Counter(step.reaches).items():
        times, size = layers * share // len(step.reaches), 2 * step.shared_keys(reach) * width
        there, back = "all-gather", "reduce-scatter"
        if reach is not None:
            there, back, size = "collective-permute", "collective-permute", size * reach // (reach + 1)
        found += [
            Transfer("keys and values", there, (CONTEXT,), size, passes * times),
            Transfer("keys and values", back, (CONTEXT,), size, times * (not compares)),
        ]
    return found


LOADS = "loads of experts"
BALANCE_LOSS, Z_LOSS = "balance_loss", "router_z_loss"


def sums_of_loads(step: StepShape) -> list[Transfer]:
    """Return the sums of the model's `routing_sums`: first over a row's positions, then over rows and replicas.

    The stages of a pipeline have those of their own layers.
    """
    kind, counts = "all-reduce", _counts(step)
    if not counts:
        return []
    of_a_row = 2 * counts + (Z_LOSS in step.balance_terms) * step.layers_with_experts + 1
    if BALANCE_LOSS in step.balance_terms and step.remat != "none":
        of_a_row += counts + 1  # the loss's gradient takes the loads, which are computed again
    size = FLOAT32 * (counts + 1 + len(step.balance_terms))  # with the imbalance
    found = [Transfer(LOADS, kind, (REPLICA,) if REPLICA in step.layout.params else (), size)]
    if step.pipeline is None:
        found.append(Transfer(LOADS, kind, (CONTEXT,), FLOAT32 * step.rows_here * of_a_row, step.microbatches))
        return [*found, Transfer(LOADS, kind, ("stage", "data"), size, step.microbatches)]
    sums = FLOAT32 * (counts + (1 + (Z_LOSS in step.balance_terms)) * step.layers_with_experts)
    mask = FLOAT32 * step.tokens * step.mesh[STAGE]  # it travels with its rows
    return [
        *found,
        Transfer(LOADS, kind, (DATA,), sums // step.mesh[STAGE], step.microbatches),
        Transfer(LOADS, "all-gather", (STAGE,), sums + mask, step.microbatches),
    ]


def _counts(step: StepShape) -> int:
    """Return the number of loads: experts of all layers."""
    return sum(layers_of(each) * each.axes[-1].size for each in step.computed if is_of_choice(each))


def sums_of_experts(step: StepShape, backend: Backend, activations: int, recomputes: bool) -> list[Transfer]:
    """Return the sums over `model` of layers with experts: outputs, gradients, and those of the experts' weights.

    - `activations`: bytes of a microbatch's activations
    - `recomputes`: the backward pass computes a layer's sums again
    """
    times = step.microbatches * step.layers_with_experts
    more = _more_sums(step, backend, recomputes) * activations
    return [
        Transfer("activations", "all-reduce", (MODEL,), more, times),
        Transfer("weights of experts", "all-reduce", (MODEL,), step.pairs * FLOAT32, times),
    ]


def exchanges(step: StepShape, backend: Backend, recomputes: bool) -> list[Transfer]:
    """Return the all-to-alls of one round, and the comparisons of the number of rounds; the routing decides on others.

    A pass sends each row's expert and weight, and the forward pass a token there and its output back. The backward pass
    sends the token and the gradient of its output there, and the gradients by token and by weight back.

    - `recomputes`: the backward pass computes a layer again; it shares the rows there with that computation
    """
    if not step.exchanged_rows:
        return []
    token, number = step.embed * max(step.compute_bytes, backend.narrowest_bytes), INTEGER + FLOAT32
    a_row = (6 if step.norms_after and recomputes else 5) * token + 2 * number + FLOAT32
    times = step.microbatches * step.layers_with_experts
    return [
        Transfer("rows of experts", "all-to-all", step.expert_axes, step.exchanged_rows * a_row, times),
        Transfer("rounds", "all-reduce", (CONTEXT, DATA), INTEGER, 2 * times),
    ]


def sent_forward(step: StepShape, backend: Backend, activations: int) -> list[Transfer]:
    """Return the transfers of a forward pass without gradients: outputs of a shared MLP, and a round of an exchange.

    - `activations`: bytes of a microbatch's activations
    """
    times, rounds = step.microbatches * step.layers_with_experts, INTEGER * bool(step.exchanged_rows)
    a_row = 2 * step.embed * max(step.compute_bytes, backend.narrowest_bytes) + INTEGER + FLOAT32
    return [
        Transfer("activations", "all-reduce", (MODEL,), activations * ("mlp" in _beside(step)), times),
        Transfer("rows of experts", "all-to-all", step.expert_axes, step.exchanged_rows * a_row, times),
        Transfer("rounds", "all-reduce", (CONTEXT, DATA), rounds, times),
    ]


def _beside(step: StepShape) -> set[str]:
    """Return the names of axes of the weights beside experts, in their layers."""
    stack = {weight.axes[0] for weight in step.computed if is_of_experts(weight)}
    beside = [each for each in step.computed if each.axes[0] in stack and not is_of_experts(each)]
    return {axis.name for weight in beside for axis in weight.axes}


def _more_sums(step: StepShape, backend: Backend, recomputes: bool) -> int:
    """Return the number of sums of activations, less those of a layer with an MLP.

    The rule of the experts adds the gradients by gate and up on a device. A shared MLP has sums of its own; if it is
    weighed or normalised, the backward pass needs its output.
    """
    names = _beside(step)
    backward = 0 if backend.merges_sums else -1
    if "mlp" not in names:
        return backward
    again = (SHARED_GATE in names or step.norms_after) and recomputes
    return backward + 1 + again + (1 if backend.merges_sums else 2)


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


STAGE, DATA = "stage", "data"
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


KEY = 8  # of a row, for what adapters drop
EXTRAS = 2  # positions and segments travel with their rows
HANDED_ON = 4  # outputs, a column of inputs, and the cotangents of both


def pipelined(step: StepShape, pipeline: PipelineShape, backend: Backend) -> list[Transfer]:
    """Return the transfers of the layers in all microbatches of a step.

    In each pass weights move from the device order of their rows to that of their stages, and gradients back. Weights
    are gathered over `data` for the window. Each iteration sends activations to the next stage.
    """
    stages, passes, iterations = step.mesh[STAGE], step.microbatches, step.microbatches * pipeline.iterations
    one, layers = of_an_iteration(step, pipeline), layers_of_a_stage(step, pipeline)
    activations = activation_bytes(step, backend) * stages // pipeline.microbatches
    handed_on = HANDED_ON * iterations
    if pipeline.drain == 1:  # not a loop: its last outputs are unused, and their cotangent is zero
        handed_on -= 2 * passes - backend.hoists_gathers
    sums = sums_of_a_layer(step, backend)
    if layers > 1 and step.remat in RECOMPUTED_SUMS and not step.norms_after:
        sums += 1  # the next layer is recomputed from the complete output
    norms, times = head_norm_sums(step) * FLOAT32 * one.tokens, layers * iterations
    of_experts = sums_of_experts(one, backend, activations, step.remat in RECOMPUTED_SUMS) if step.active else []
    return [
        *(each for weight in step.stacked() for each in _weight(step, weight, pipeline, backend)),
        *_factors(step, one, pipeline, backend),
        Transfer("activations", "collective-permute", (STAGE,), activations, handed_on),
        Transfer("positions and segments", "all-gather", (STAGE,), EXTRAS * INTEGER * step.tokens * stages, passes),
        Transfer("keys of dropout", "all-gather", (STAGE,), KEY * step.drops * step.rows_here * stages, passes),
        Transfer("activations", "all-reduce", (MODEL,), sums * activations, times),
        Transfer("norms over heads", "all-reduce", (MODEL,), norms, times),
        *(replace(each, times=times) for each in of_experts),
    ]


def _weight(step: StepShape, weight: NamedArray, pipeline: PipelineShape, backend: Backend) -> list[Transfer]:
    """Return the transfers of one weight of all layers: to its stages and back, its gathers, its gradient sums.

    A frozen weight has no gradient; one in blocks is sent as codes and scales.
    """
    width, passes, iterations = max(step.compute_bytes, backend.narrowest_bytes), step.microbatches, pipeline.iterations
    split, held = step.split_by(weight, step.layout.params), step.format_of(weight)
    moved, slot = (step.on_device(weight, mapping) for mapping in (step.layout.params, step.layout.compute))
    slot //= step.mesh[STAGE] * pipeline.repeats
    size, sums = {
        "per_repeat": (slot, pipeline.repeats),
        "per_iteration": (slot, iterations),
        "once": (slot * pipeline.repeats, 1),
    }[pipeline.gather]
    found, once = [], 1 if backend.hoists_gathers else passes
    least = width if held is None else backend.narrowest_bytes
    if STAGE in split:
        parts = bytes_by_part(held, moved, least).items()
        found += [Transfer(part, "all-to-all", (STAGE,), count, once) for part, count in parts]
    if DATA in split:
        bare = {"weights": step.compute_bytes} if held is None else {"scales": held.scale_bits // 8}
        for part, count in bytes_by_part(held, size, least).items():
            times = _gathers(passes, pipeline, backend, widens=bare.get(part, FLOAT32) < backend.narrowest_bytes)
            found.append(Transfer(part, "all-gather", (DATA,), count, times))
    if not trained_in(step, [weight]):
        return found
    back, kind = "all-to-all" if STAGE in split else "all-gather", "reduce-scatter" if DATA in split else "all-reduce"
    found.append(Transfer("from stages", back, (STAGE,), moved * width, passes))
    found.append(Transfer("gradients", kind, (DATA,), size * width, passes * sums))
    if not is_on_model(weight):
        found.append(Transfer("gradients", "all-reduce", (MODEL,), slot * width, passes * iterations))
    return found


def _factors(step: StepShape, one: StepShape, pipeline: PipelineShape, backend: Backend) -> list[Transfer]:
    """Return the sums over `model` of products with factors; `one`: see `of_an_iteration`."""
    forward, apart = 3 if step.quantised else 2, step.mesh[STAGE] * pipeline.repeats  # layers that decode run again
    times = step.microbatches * pipeline.iterations
    return [
        Transfer("factors", "all-reduce", (MODEL,), size, times * layers_of(factor) // apart)
        for factor, size in products_with_factors(step, backend, one.tokens, forward)
    ]


def _gathers(passes: int, pipeline: PipelineShape, backend: Backend, widens: bool) -> int:
    """Return the number of gathers of a weight in a step; the compiler may do a gather that all passes share once.

    - `widens`: the compiler widens the values, and leaves this in the loop of the last iterations
    """
    same = 1 if backend.hoists_gathers else passes
    with_one_repeat = same if pipeline.repeats == 1 else passes
    match pipeline.gather:
        case "per_iteration" if widens:
            return 2 * pipeline.iterations * passes
        case "per_repeat":
            return 2 * pipeline.repeats * with_one_repeat
        case "per_iteration":
            return 2 * (pipeline.microbatches * pipeline.repeats * passes + with_one_repeat)
    return same
