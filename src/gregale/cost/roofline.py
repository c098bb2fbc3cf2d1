"""Provides the roofline of a step: the minimum time of its work on a chip and its links."""

from collections.abc import Mapping
from dataclasses import dataclass

from gregale.cost.chips import EIGHT_BIT, Chip
from gregale.cost.collectives import BETWEEN, INSIDE
from gregale.cost.estimate import StepShape, has_vocabulary, is_of_experts, is_stacked, offloaded_bytes, values
from gregale.cost.pallas_cost import visible

FLOAT32 = 4
FORWARD, BACKWARD = 2, 4  # FLOPs for a weight and a token: a multiply-add, and two of them for both gradients
KERNEL_BACKWARD = 5 / 2  # products of a kernel's backward over those of its forward pass, which saves no scores


@dataclass(frozen=True)
class Work:
    """Work of one device in a step.

    Attributes:
        model_flops: FLOPs of the model in closed form, with the pairs that the mask leaves.
        full_flops: the same with all pairs of a query and a key.
        flops: computed FLOPs: without products that an attention kernel skips, with recomputation in the backward pass,
            the loss's padding, idle stages of a pipeline, and the optimizer's matrix products.
        memory_bytes: minimum bytes read from or written to the device's memory.
        link_bytes: bytes that the device sends over each link.
        host_bytes: bytes moved to the host's memory and back.
        eight_bit_flops: those of `flops` in products of 8-bit numbers (`compute.matmul`).
    """

    model_flops: float
    flops: float
    memory_bytes: float
    link_bytes: Mapping[str, float]
    host_bytes: float = 0.0
    full_flops: float = 0.0
    eight_bit_flops: float = 0.0


@dataclass(frozen=True)
class Roofline:
    """Seconds that a step needs for each resource alone, at its peak.

    `model` are those of the model's FLOPs with the visible pairs, `full` those with all pairs.
    """

    compute: float
    memory: float
    links: Mapping[str, float]
    model: float
    host: float = 0.0
    full: float = 0.0

    @property
    def overlapped(self) -> float:
        """Return the time of a step with full overlap: that of the slowest resource."""
        return max(self.compute, self.memory, self.host, *self.links.values())

    def utilisation(self, seconds: float) -> dict[str, float | None]:
        """Return the model FLOPs utilisation of a step of this length, as a share of the peak in bfloat16.

        - `utilisation`: with causal attention, so with the pairs that the mask leaves; at most 1 without 8-bit products
        - `utilisation_full_attention`: with all pairs, as in PaLM (arXiv 2204.02311) and MaxText until 2025. None above
          1, which it reaches if a kernel skips most of them
        """
        full = self.full / seconds
        return {"utilisation": self.model / seconds, "utilisation_full_attention": full if full <= 1 else None}

    @property
    def one_after_another(self) -> float:
        """Return the time of a step without overlap, except of memory and compute."""
        return max(self.compute, self.memory) + sum(self.links.values()) + self.host


def model_flops_per_token(step: StepShape, full: bool = False) -> float:
    """Return `6 * N + 12 * layers * heads * head_size * keys`: forward and backward pass for one token.

    N are the weights of products, so without the embedding unless it is also the head, and with a token's own experts
    alone. Frozen ones count 4 instead of 6: they have no gradients. `keys` are those that the mask leaves a query on
    average: about half of the positions for a causal mask. A loss that compares has a forward pass more.

    - `full`: count all positions as keys
    """
    keys, count = step.positions if full else _visible_keys(step), _multiplied(step)
    own = (FORWARD + BACKWARD) * keys * _for_a_key(step) + _products(step, count)
    return own + bool(step.reference) * FORWARD * (keys * _for_a_key(step) + sum(_compared(step)))


def _visible_keys(step: StepShape) -> float:
    return visible(step.positions, step.windows) / step.positions


def work_of(step: StepShape, optimizer_bytes: int, link_bytes: Mapping[str, float], update_flops: float = 0.0) -> Work:
    """Return the work of one device in a step: products, and memory for weights, activations, gradients, the optimizer.

    - `optimizer_bytes`: bytes of the optimizer's state
    - `update_flops`: FLOPs of the optimizer's matrix products
    """
    tokens = step.rows * step.positions / step.layout.mesh.size
    # A kernel skips masked keys.
    keys = step.positions if step.scores else _visible_keys(step)
    attention = FORWARD * keys * _for_a_key(step)
    backward = BACKWARD / FORWARD if step.scores else KERNEL_BACKWARD
    every, stacked = (_products(step, count) for count in (_multiplied(step), _stacked(step)))
    layers = stacked + (1 + backward) * attention + _again(step, attention)
    single = (every - stacked) * step.loss_blocks.tokens / step.tokens
    if step.reference:
        of_layers, of_head = _compared(step)
        layers += FORWARD * of_layers + attention
        single += 2 * FORWARD * of_head  # the model's own, too: gradients compute the logits again
    idle = step.pipeline.drain / (step.pipeline.iterations - step.pipeline.drain) if step.pipeline else 0
    return Work(
        model_flops=model_flops_per_token(step) * tokens,
        flops=(single + (1 + idle) * layers) * tokens + update_flops,
        memory_bytes=_memory_bytes(step, optimizer_bytes),
        link_bytes=link_bytes,
        host_bytes=2 * step.microbatches * step.layers * offloaded_bytes(step),
        full_flops=model_flops_per_token(step, full=True) * tokens,
        eight_bit_flops=(1 + idle) * _in_eight_bits(step) * tokens,
    )


def _in_eight_bits(step: StepShape) -> float:
    """Return the FLOPs per token of the layers' products of 8-bit numbers: none gives gradients of experts' weights."""
    if step.matmul == "dtype":
        return 0
    products = _products(step, _stacked(step)) + _again(step, attention=0) + FORWARD * _compared(step)[0]
    experts = sum(step.active_values(each) for each in step.stacked() if is_of_experts(each))
    if step.matmul != "int8":
        return products * (1 - experts / _stacked(step))
    return products if step.adapts else products - FORWARD * experts


def _multiplied(step: StepShape) -> int:
    """Return the number of weights in products: without an embedding that is not the head."""
    tables = [weight for weight in step.single() if has_vocabulary(weight)]
    return step.active_parameters - (values(tables[0].axes) if len(tables) > 1 else 0)


def _compared(step: StepShape) -> tuple[int, int]:
    """Return the values that the pass of the reference multiplies a token with: of layers, and of the head."""
    layers = sum(step.active_values(each) for each in step.reference if is_stacked(each))
    return layers, step.embed * step.vocabulary * step.mesh["model"]


def _products(step: StepShape, count: int) -> int:
    """Return the FLOPs per token of the products of `count` values; of values that are frozen without gradients."""
    return (FORWARD + BACKWARD) * count - FORWARD * (count - step.parameters if step.adapts else 0)


def _stacked(step: StepShape) -> int:
    return sum(map(step.active_values, step.stacked()))


def _for_a_key(step: StepShape) -> int:
    """Return multiply-adds of attention for a query and a key in all layers: the score, and probability times value."""
    return 2 * step.layers * step.heads * step.head_size


def _again(step: StepShape, attention: float) -> float:
    """Return the FLOPs per token that the backward pass recomputes in all layers.

    They exclude the last product of a layer, whose result is unused unless it is normalised, and that of attention if
    its result is saved (`splits_stream`). Of the `attention` FLOPs
    of the forward pass, half recompute the scores, unless a kernel saves its row statistics.
    """
    scores = attention / 2 if step.scores else 0
    unneeded = ["mlp"] * (not step.norms_after) + ["head_size"] * step.splits_stream
    last = [weight for weight in step.stacked() if weight.axes[-1].name == "embed" and weight.axes[-2].name in unneeded]
    products = FORWARD * (_stacked(step) - sum(map(step.active_values, last)))
    match step.remat:
        case "none":
            return 0
        case "projections":
            return scores
        case "context" | "context_offload" | "attention":
            return products + scores
    return products + attention


def _memory_bytes(step: StepShape, optimizer_bytes: int) -> float:
    """Return the bytes that microbatches move: weights of each pass, inputs of layers, and gradient buffers.

    They exclude the values between a layer's operations under each policy, because saved ones are only read once more.
    """
    gathered, fixed = (
        sum(step.on_device(weight, step.layout.compute) for weight in weights)
        for weights in (step.weights, [*step.frozen, *step.quantised])
    )
    shard = sum(step.on_device(weight, step.layout.params) for weight in step.weights)
    passes = 3 if step.remat in ("none", "projections") else 4
    inputs = 2 * step.layers * step.stream * step.compute_bytes
    compared = sum(step.on_device(each, step.layout.compute) for each in step.reference)
    weights = (passes * gathered + (passes - 1) * fixed + compared) * step.compute_bytes
    microbatch = weights + 2 * shard * FLOAT32 + inputs
    return step.microbatches * microbatch + 2 * optimizer_bytes + 4 * shard * FLOAT32


def link_rates(chip: Chip, devices_a_chip: int, between_bytes_per_second: float | None) -> dict[str, float]:
    """Return a device's send rate over each link with a known rate; arguments as for `roofline`."""
    rates = {INSIDE: chip.link_bytes_per_second / devices_a_chip}
    if between_bytes_per_second is not None:
        rates[BETWEEN] = between_bytes_per_second
    elif chip.network_bytes_per_second is not None:
        rates[BETWEEN] = chip.network_bytes_per_second / devices_a_chip
    return rates


def roofline(work: Work, chip: Chip, devices_a_chip: int, between_bytes_per_second: float | None) -> Roofline:
    """Return the seconds for each resource of a chip's device.

    - `between_bytes_per_second`: the device's send rate between slices; None: the chip's share of its network. A chip
      without a published network has no such time
    """
    peak = chip.flops_per_second / devices_a_chip
    rates = link_rates(chip, devices_a_chip, between_bytes_per_second)
    return Roofline(
        compute=(work.flops - work.eight_bit_flops * (1 - 1 / EIGHT_BIT)) / peak,
        memory=work.memory_bytes / (chip.memory_bytes_per_second / devices_a_chip),
        links={link: work.link_bytes.get(link, 0.0) / rate for link, rate in rates.items()},
        model=work.model_flops / peak,
        full=work.full_flops / peak,
        host=work.host_bytes / (chip.host_bytes_per_second / devices_a_chip),
    )
