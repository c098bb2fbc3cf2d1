"""Provides the inputs of the closed forms of a PSDP step's traffic and memory: shapes, mappings and counts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from haliax import Axis, NamedArray

from gregale.audit.pipeline_shape import PipelineShape
from gregale.axes.expert_rounds import rows_to_a_device
from gregale.axes.layout import CONTEXT, EXPERTS, REPLICA, ROUTER, SHARED_GATE, AxisMapping, Layout, is_layers
from gregale.axes.position_order import chunks_reached
from gregale.axes.vocabulary import LossBlocks, exchanges_rows, loss_blocks
from gregale.codecs.formats import WireFormat


@dataclass(frozen=True)
class Backend:
    """Properties of a compiler that affect a step.

    - `narrowest_bytes`: bytes of a bfloat16 value during transfers and products; XLA:CPU widens it to float32.
    - `hoists_gathers`: a gather that all microbatches share runs once, before the loop.
    - `merges_sums`: `sum(a) + sum(b)` over devices becomes one `sum(a + b)`.
    - `scatters_layers`: the sum of a layer's gradients is a reduce-scatter; XLA:CPU does an all-reduce.
    - `fuses_softmax`: a softmax and its gradient need only few arrays of scores or logits.
    - `lanes`: the last axis of an array is padded to a multiple: a head with an attention kernel; `gradient_values`.
    - `narrows_ahead`: all weights of a device are cast to the compute dtype before the loop over layers.
    - `adds_at_end`: a microbatch's gradients of all layers exist before their addition to the buffers.
    - `least`, `most`: the compiler's peak over the closed form's in compiled examples, docs/plan.md.
    """

    narrowest_bytes: int
    hoists_gathers: bool
    merges_sums: bool
    scatters_layers: bool
    fuses_softmax: bool
    lanes: int = 1
    narrows_ahead: bool = False
    adds_at_end: bool = False
    least: float = 0.85
    most: float = 1.17

    def range(self, closed_form: float) -> tuple[int, int]:
        """Return the bytes between which the compiler's peak lies if the closed form gives `closed_form`."""
        return int(self.least * closed_form), int(self.most * closed_form)


CPU = Backend(narrowest_bytes=4, hoists_gathers=True, merges_sums=False, scatters_layers=False, fuses_softmax=False)
ACCELERATOR = Backend(
    narrowest_bytes=2, hoists_gathers=False, merges_sums=True, scatters_layers=True, fuses_softmax=True, least=0.65
)
TPU = replace(ACCELERATOR, lanes=128, narrows_ahead=True, adds_at_end=True, least=0.84, most=1.25)


@dataclass(frozen=True)
class ParameterShape:
    """The parameters of any model and the batch of a step: the sizes that the traffic of methods depends on.

    - `layout`: the mesh and the mappings of all replicas
    - `weights`: the abstract parameters; those of layers have the axis `layers`
    - `rows`, `positions`: sequences in a step's batch, and tokens of a sequence
    - `microbatches`: parts of a replica's batch
    - `compute_bytes`: bytes of a value of the compute dtype
    """

    layout: Layout
    weights: Sequence[NamedArray]
    rows: int
    positions: int
    microbatches: int
    compute_bytes: int

    @property
    def mesh(self) -> dict[str, int]:
        return dict(self.layout.mesh.shape)

    @property
    def parameters(self) -> int:
        """Return the number of values in all weights."""
        return sum(values(weight.axes) for weight in self.weights)

    def on_device(self, weight: NamedArray, mapping: AxisMapping) -> int:
        """Return the number of values of a weight on one device under a mapping, over all layers."""
        split = prod(self.mesh[axis] for axis in self.layout.mesh_axes(weight.axes, mapping))
        return values(weight.axes) // split

    def split_by(self, weight: NamedArray, mapping: AxisMapping) -> tuple[str, ...]:
        """Return the mesh axes larger than 1 that split a weight under a mapping, in mesh order."""
        found = self.layout.mesh_axes(weight.axes, mapping)
        return tuple(axis for axis, size in self.mesh.items() if axis in found and size > 1)


@dataclass(frozen=True)
class StepShape(ParameterShape):
    """A PSDP step of a decoder by its sizes.

    - `remat`: the policy for a layer's saved activations
    - `per_step`: weights are gathered once per step, not once per layer
    - `loss_block`: tokens whose logits exist at one time
    - `unrolled`: there is no loop over layers
    - `scores`: attention holds its scores; a kernel does not
    - `rules`: differentiation rules (`Kernels.rules`); those of a platform save less than JAX
    - `windows`: maximum number of keys that a query sees, for equal shares of the layers; None: all earlier ones
    - `norms_after`: the outputs of both halves of a layer are normalised, so that the backward pass needs them
    - `norms_over_heads`: queries are normalised over all heads, and keys, so that `model` shares their mean squares
    - `sums_behind`: sums of gradients over devices overlap the backward pass of the layers below
    - `splits_stream`: `model` splits the stream between the halves of layers too, see `Execution.stream`
    - `pipeline`: pipeline of the layers; None: they are scanned
    - `matmul`: numbers of the layers' products (`compute.matmul`)
    - `fuses_logits`: logits are in memory only as a group's exponentials (`Execution.fused_logits`, a whole vocabulary)
    - `active`: experts of a token; 0 for layers without experts
    - `balance_terms`: names of the terms of the loss that balance experts
    - `z_loss`: the loss has a z-loss
    - `frozen`: weights beside adapters, which `weights` then are: in the compute dtype, without gradients
    - `quantised`: further weights beside adapters, which are held and gathered in `blocks`
    - `drops`: adapters drop inputs, by keys of rows and of the first row of A
    - `reference`: frozen weights with whose log-likelihoods the loss compares (DPO): beside adapters, or a copy
    """

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    remat: str
    per_step: bool
    loss_block: int
    unrolled: bool = False
    scores: bool = True
    rules: str = "plain"
    windows: Sequence[int | None] = (None,)
    norms_after: bool = False
    norms_over_heads: bool = False
    sums_behind: bool = False
    splits_stream: bool = False
    pipeline: PipelineShape | None = None
    matmul: str = "dtype"
    fuses_logits: bool = False
    active: int = 0
    balance_terms: Sequence[str] = ()
    z_loss: bool = False
    frozen: Sequence[NamedArray] = ()
    quantised: Sequence[NamedArray] = ()
    blocks: WireFormat | None = None
    drops: bool = False
    reference: Sequence[NamedArray] = ()

    @property
    def computed(self) -> list[NamedArray]:
        """Return all weights of the computation, trained and frozen."""
        return [*self.weights, *self.frozen, *self.quantised]

    @property
    def adapts(self) -> bool:
        return bool(self.frozen)

    def format_of(self, weight: NamedArray) -> WireFormat | None:
        """Return the format of the blocks that hold a weight; None: it is an array of floats."""
        return self.blocks if any(each is weight for each in self.quantised) else None

    @property
    def tokens(self) -> int:
        """Return the tokens of one microbatch on one device."""
        return self.rows_here * self.positions // self.mesh[CONTEXT]

    @property
    def rows_here(self) -> int:
        """Return the rows of one microbatch of which one device has tokens."""
        return self.rows // (self.microbatches * prod(self.mesh[axis] for axis in BATCH_MESH_AXES if axis in self.mesh))

    @property
    def reaches(self) -> list[int | None]:
        """Return the chunks that each of `windows` reaches, see `chunks_reached`."""
        devices = self.mesh[CONTEXT]
        return [chunks_reached(self.positions // (2 * devices), devices, window) for window in self.windows]

    def shared_keys(self, reach: int | None) -> int:
        """Return a device's values of a layer's keys, or values, with those of other devices; 0 if it shares nothing.

        - `reach`: see `reaches`
        """
        if (devices := self.mesh[CONTEXT]) == 1:
            return 0
        here = self.rows_here * self.positions // devices * self.kv_heads // self.mesh["model"] * self.head_size
        return here * (devices if reach is None else reach + 1)

    @property
    def stream(self) -> int:
        """Return a device's values of the stream between the halves of layers."""
        return self.tokens * self.embed // (self.mesh["model"] if self.splits_stream else 1)

    @property
    def embed(self) -> int:
        return self._size("embed")

    @property
    def vocabulary(self) -> int:
        """Return the rows of the table on one device."""
        return self._size("vocab") // self.mesh["model"]

    @property
    def mlp(self) -> int:
        """Return a token's values of the feed-forward layer on one device, of all its experts, unless they are
        exchanged; the mean, if layers differ."""
        inner = {
            (each.axes[0], is_of_experts(each)): axis.size
            for each in self.stacked()
            for axis in each.axes
            if axis.name == "mlp"
        }
        active = 0 if self.expert_axes else self.active
        found = sum(Layers.size * width * (active if of else 1) for (Layers, of), width in inner.items())
        return found // (self.layers * self.mesh["model"])

    @property
    def active_parameters(self) -> int:
        """Return the number of values that a token is multiplied with, or looked up in: all weights but of the experts
        that it does not pass through."""
        return sum(map(self.active_values, self.computed))

    def active_values(self, weight: NamedArray) -> int:
        """Return the values of a weight in all layers that take part in the computation of one token."""
        count = values(weight.axes)
        return count * self.active // weight.resolve_axis(EXPERTS).size if is_of_experts(weight) else count

    @property
    def layers_with_experts(self) -> int:
        return max((layers_of(each) for each in self.computed if is_of_experts(each)), default=0)

    @property
    def pairs(self) -> int:
        """Return the (token, expert) pairs of one microbatch on one device."""
        return self.tokens * self.active

    @property
    def expert_width(self) -> int:
        """Return the width of an expert on one device; 0 without experts."""
        widths = [each.resolve_axis("mlp").size for each in self.computed if is_of_experts(each)]
        return max(widths, default=0) // self.mesh["model"]

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Return the mesh axes over which experts are exchanged; empty if they are gathered."""
        return self.layout.mesh_axes((EXPERTS,), self.layout.compute)

    @property
    def exchanged_rows(self) -> int:
        """Return the rows that one device sends in a round of an exchange, and gets; 0 if experts are gathered."""
        if not self.expert_axes:
            return 0
        devices = prod(self.mesh[axis] for axis in self.expert_axes)
        return devices * rows_to_a_device(self.pairs, devices)

    def _size(self, name: str) -> int:
        return next(axis.size for weight in self.computed for axis in weight.axes if axis.name == name)

    @property
    def shards(self) -> int:
        """Return the number of devices of a replica with different rows and parameters."""
        return self.mesh[CONTEXT] * self.mesh["data"] * self.mesh["stage"]

    @property
    def exchanges_rows(self) -> bool:
        """Return whether devices exchange the embedding's rows instead of a gather of the table."""
        return exchanges_rows(self.tokens, self.embed, self.vocabulary, self.compute_bytes, self.shards)

    def uses(self, weight: NamedArray) -> int:
        """Return the number of uses of a complete weight in a pass: an embedding is used for the lookup, unless devices
        exchange rows, and as the head, if there is no other."""
        if weight.axes[0].name != "vocab":
            return 1
        heads = [each for each in self.single() if each.axes[0].name != "vocab" and has_vocabulary(each)]
        return (not heads) + (not self.exchanges_rows)

    @property
    def loss_blocks(self) -> LossBlocks:
        """Return the blocks into which the loss splits a device's tokens."""
        return loss_blocks(self.tokens, self.embed, self.compute_bytes, self.loss_block, self.fuses_logits)

    def stacked(self) -> list[NamedArray]:
        """Return the weights of the layers."""
        return [weight for weight in self.computed if is_stacked(weight)]

    def single(self) -> list[NamedArray]:
        """Return the weights outside of layers: embedding, head, last norm."""
        return [weight for weight in self.computed if not is_stacked(weight)]

    def gradient_values(self, weight: NamedArray, lanes: int) -> int:
        """Return the size of a device's buffer for the gradient of a weight, over all layers.

        A buffer that is reduced over `replica` has the order of the weight's axes. If the last axis is split, a device
        has few contiguous values of it, and pads them to whole lanes; not for experts, whose sums are scattered by the
        model itself.
        """
        count, last = self.on_device(weight, self.layout.params), weight.axes[-1]
        shards = prod(self.mesh[axis] for axis in self.layout.mesh_axes((last,), self.layout.params))
        if (
            shards == 1
            or is_of_experts(weight)
            or self.split_by(weight, self.layout.opt_state) == self.split_by(weight, self.layout.params)
        ):
            return count
        width = last.size // shards
        return count // width * -(-width // lanes) * lanes


BATCH_MESH_AXES = ("island", REPLICA, "data", "stage")


def values(axes: Sequence[Axis]) -> int:
    return prod(axis.size for axis in axes)


def has_vocabulary(weight: NamedArray) -> bool:
    return any(axis.name == "vocab" for axis in weight.axes)


def is_of_experts(weight: NamedArray) -> bool:
    """Return whether a weight has a matrix, or a bias, for each expert."""
    return any(axis.name == EXPERTS for axis in weight.axes)


def is_of_router(weight: NamedArray) -> bool:
    """Return whether a weight gives numbers of a token that weigh experts, or the MLP beside them."""
    return is_of_choice(weight) or weight.axes[-1].name == SHARED_GATE


def is_of_choice(weight: NamedArray) -> bool:
    """Return whether a weight, and no bias, gives a token's logits of the experts."""
    return weight.axes[-1].name == ROUTER and len(weight.axes) > 2


def is_of_linear(weight: NamedArray) -> bool:
    """Return whether a weight is the matrix of a linear layer."""
    return is_stacked(weight) and len(weight.axes) > 2 and not is_of_experts(weight) and not is_of_router(weight)


def in_eight_bits(weight: NamedArray, matmul: str) -> bool:
    """Return whether `compute.matmul` quantises a weight: the matrix of a linear layer, or by `int8` of experts."""
    if is_of_experts(weight):
        return matmul == "int8" and len(weight.axes) > 3
    return matmul != "dtype" and is_of_linear(weight)


def is_stacked(weight: NamedArray) -> bool:
    return any(is_layers(axis.name) for axis in weight.axes)


def layers_of(weight: NamedArray) -> int:
    """Return the number of layers that have a part of a weight; 1 if it belongs to none."""
    return next((axis.size for axis in weight.axes if is_layers(axis.name)), 1)
