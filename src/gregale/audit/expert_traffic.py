"""Provides the bytes that layers with experts send in addition to others, in closed form.

Their weights and gradients count as those of other layers (`gregale.audit.traffic`).
"""

from gregale.audit.step import Backend, StepShape, is_of_choice, is_of_experts, layers_of
from gregale.audit.transfer import Transfer
from gregale.axes.layout import CONTEXT, MODEL, REPLICA, SHARED_GATE

INTEGER, FLOAT32 = 4, 4
STAGE, DATA = "stage", "data"
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
