from dataclasses import replace

import haliax as hax
import jax
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gregale.axes.layout import MappingConfig
from gregale.cost.estimate import (
    ACCELERATOR,
    CPU,
    TPU,
    StepShape,
    bytes_on_device,
    compiler_memory,
    estimate_memory,
    layer_activations,
    values_of_a_layer,
)
from gregale.model.config import TARGETS, ExpertsConfig, LoraConfig
from gregale.model.execution import execution
from gregale.model.kernels.cpu import cpu_kernels
from gregale.model.kernels.operations import PLAIN
from gregale.model.kernels.tpu.blocks import LANES
from gregale.model.kernels.tpu.kernels import tpu_kernels
from gregale.objectives import DpoConfig
from gregale.optim import MuonConfig
from gregale.programs.plan.estimates import abstract_batch, estimate, step_shape, tree_bytes
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import BatchConfig
from tests.cost.steps import FAST, lowered_step, small_setup, small_step

WEIGHTS = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32  # of a layer of the small model
TABLE = 320 * 32


def test_bytes_on_a_device_follow_the_sharding():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    split = jax.ShapeDtypeStruct((8, 6), "float32", sharding=NamedSharding(mesh, P("a", "b")))
    copied = jax.ShapeDtypeStruct((5,), "int32", sharding=NamedSharding(mesh, P()))
    assert bytes_on_device({"x": split, "y": [copied, None]}) == 2 * 3 * 4 + 5 * 4


def test_state_and_batch_are_the_compiled_programs_arguments():
    setup = small_setup((2, 2, 2))
    trees = tree_bytes(setup)
    state = jax.jit(lambda state: state, donate_argnums=0).lower(setup.abstract_state()).compile()
    assert compiler_memory(state).arguments == trees.state
    assert compiler_memory(state).peak == pytest.approx(trees.state, rel=0.01)
    assert trees.batch == 5 * 32 * 16 * 4 // 4, "five arrays, split over four devices"


def test_closed_form_by_hand():
    """A layer of 1 x 16 tokens on a device, hidden 32, heads 8 of 4, mlp 64, vocabulary 320, all in float32."""
    step = small_step((8, 1, 1), microbatches=4, compute={"remat": "full"})
    found = estimate_memory(step, arguments=1000, backend=CPU)
    assert (found.arguments, found.buffers) == (1000, 4 * (3 * WEIGHTS + 2 * TABLE + 32))
    assert found.saved == 3 * 16 * 32 * 4
    assert found.tables == 4 * (2 * TABLE + 32)
    layer = 2 * 4 * WEIGHTS + 12 * 4 * 16 * 32
    attention = (4 * 4 + 1) * 16 * 16 * 8 + 8 * 4 * 16 * 32
    loss = 4 * (3 * 16 * 320 + 16 * 320 + TABLE + 2 * 16 * 32)
    assert found.working == max(layer + max(attention, 6 * 4 * 16 * 64), loss)
    assert found.peak == 1000 + found.buffers + found.saved + found.tables + found.working


def test_exchanged_experts_hold_rows_of_a_round_and_gathered_ones_weights_and_half_their_gradients():
    """Of 8 experts a device exchanges 2: 32 tokens have 64 pairs, and a round 4 x 24 rows."""

    def step(**mapping) -> StepShape:
        others = {"mapping": MappingConfig(compute=mapping)}
        model = {"experts": ExpertsConfig(8, 2, width=512), "dense_layers": 1}
        found = small_step((1, 4, 1), 4, compute={"remat": "projections"}, model=model, others=others)
        return replace(found, scores=False)

    gathered, exchanged = step(), step(experts="data")
    assert (exchanged.pairs, exchanged.exchanged_rows, gathered.exchanged_rows) == (64, 96, 0)
    saved = [estimate_memory(each, 0, CPU).saved for each in (gathered, exchanged)]
    assert saved[0] - saved[1] == 3 * 4 * 2 * 32 * ((2 * 2 * 512 + 64) // 3 - 64 // 3), "gate and up of 2 of 3 layers"
    stream = (7 + 5) * 32 * 32
    assert layer_activations(exchanged, CPU) == 4 * (stream + 5 * 96 * 32 + 4 * 96 * 512)
    for each, experts in ((gathered, 8), (exchanged, 2)):
        weights = 2 * values_of_a_layer(each) - 0.5 * experts * 3 * 32 * 512 * 2 / 3
        assert estimate_memory(each, 0, CPU).working == 4 * weights + layer_activations(each, CPU)


def test_tables_and_groups():
    """An embedding whose rows are exchanged is not gathered, unless it is the head; groups are added up in a table."""

    def estimated(microbatches=4, loss_block=24, mesh=(1, 4, 2), **model):
        compute = {"loss_block": loss_block, "remat": "full"}
        return estimate_memory(small_step(mesh, microbatches, compute, model), 0, CPU)

    table = 320 * 32 // 2 * 4
    assert estimated().tables == table + 4 * 32
    assert estimated(tied_head=True).tables == table + 4 * 32
    fewer = 264 * 32 // 2 * 4
    assert estimated(microbatches=1, vocabulary=264).tables == 2 * fewer + 4 * 32, "128 tokens and ids, 132 rows"
    one, several = (estimated(loss_block=block, vocabulary=6400, microbatches=2).working for block in (64, 8))
    hidden, by_head = 2 * 64 * 32 * 4, 3200 * 32 * 4
    assert one == 4 * 3200 * (3 * 64 + 64) + by_head + hidden
    assert several == 4 * 3200 * (3 * 8 + 16) + 2 * by_head + hidden


def saved_by_hand(remat: str, mesh: tuple[int, ...] = (2, 2, 1), **compute) -> int:
    """Bytes that a layer saves for each token in bfloat16, without the weights, in closed form.

    Hidden 32, heads 8 of 4, mlp 64.
    """
    step = small_step(mesh, compute={"remat": remat, "dtype": "bfloat16", "gather": "per_step", **compute})
    return estimate_memory(replace(step, scores=False), 0, ACCELERATOR).saved // (3 * step.tokens)


def test_each_policy_saves_what_it_says():
    query, key, stream, mlp = 8 * 4, 4 * 4, 32, 64
    assert saved_by_hand("offload") == 0
    assert saved_by_hand("full") == saved_by_hand("context_offload") == 2 * stream
    assert saved_by_hand("context") == 2 * stream + 4 * query
    assert saved_by_hand("context", autodiff_rules="plain") == 2 * (stream + query)
    assert saved_by_hand("projections") == 2 * (2 * stream + 2 * query + 2 * key + 2 * mlp)
    none = 2 * (2 * query + 2 * key + 6 * mlp) + (4 * 2 + 4 * 4) * stream
    assert saved_by_hand("none", autodiff_rules="plain") == none
    by_rules = 4 * (2 * query + 2 * key) + 2 * (query + 3 * mlp + 4 * stream)
    assert saved_by_hand("none", autodiff_rules="auto") == by_rules
    split = {"mesh": (1, 1, 4)}  # attention's output is saved too; inputs of products are whole
    assert saved_by_hand("full", **split) == 2 * 2 * stream // 4
    assert saved_by_hand("context", **split) == (2 * 2 * stream + 4 * query) // 4
    none = (2 * (2 * query + 2 * key) + query + 3 * mlp + 2 * stream) // 4 + 2 * stream
    assert saved_by_hand("none", **split, autodiff_rules="auto") == 2 * none


def test_without_remat_gathered_weights_are_kept_too():
    by_layer, kept = (
        estimate_memory(small_step((2, 2, 1), compute={"remat": "none", "gather": gather}), 0, ACCELERATOR)
        for gather in ("per_layer", "per_step")
    )
    assert by_layer.saved - kept.saved == 3 * 4 * WEIGHTS
    assert kept.tables == 4 * (3 * WEIGHTS + 2 * 320 * 32 + 32)


@pytest.mark.parametrize(
    ("kernels", "dtype"), [(PLAIN, "bfloat16"), (cpu_kernels(), "bfloat16"), (tpu_kernels(), "bfloat16")]
)
def test_without_remat_all_that_is_differentiated_is_kept(kernels, dtype):
    """Against the residuals of the traced loss; sizes that tell axes apart."""
    model = {"layers": 1, "hidden": 96, "heads": 8, "kv_heads": 4, "head_size": 16, "mlp": 80}
    setup = small_setup((1, 1, 1), 1, {"remat": "none", "dtype": dtype}, model)
    run = replace(execution(setup.config.compute, setup.layout, setup.config.model), kernels=kernels)
    with hax.axis_mapping({}):
        kept = saved_residuals(lambda model, batch: model.loss(batch, run)[0], setup.model, abstract_batch(setup))
    of_layers = [each for each, _ in kept if each.shape[:1] == (1,) and each.size > 1000]
    found = sum(each.size * each.dtype.itemsize for each in of_layers)
    step = replace(step_shape(setup), rules=kernels.rules, scores=kernels.rules != "cpu")
    assert estimate_memory(step, 0, CPU).saved == pytest.approx(found, rel=0.05)


def test_products_of_8_bit_numbers_hold_integers():
    """Weights of a byte, and of the six arrays in the feed-forward layer three in bfloat16 and five of integers."""
    long = {"remat": "full", "dtype": "bfloat16"}
    step = replace(small_step((1, 2, 1), 1, long, {"mlp": 4096}), scores=False, positions=4096)
    exact, eight, fp8 = (estimate_memory(replace(step, matmul=name), 0, TPU) for name in ("dtype", "int8", "fp8"))
    weights = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 4096  # norms stay in bfloat16
    assert exact.working - eight.working == weights + (6 * 2 - (3 * 2 + 5)) * step.tokens * 4096
    assert exact.working - fp8.working == weights
    assert exact.saved == eight.saved
    kept = [replace(step, remat="none", matmul=name) for name in ("dtype", "int8")]
    exact, eight = (estimate_memory(each, 0, TPU).saved for each in kept)
    assert exact - eight == 3 * weights


def test_a_kernel_of_attention_holds_no_scores():
    step = small_step((2, 2, 2), model={"mlp": 16}, compute={"remat": "none", "autodiff_rules": "plain"})
    with_scores, without = (estimate_memory(replace(step, scores=scores), 0, ACCELERATOR) for scores in (True, False))
    scores = 4 * 16 * 16 * 4  # of two rows a microbatch and device, half of the heads
    assert with_scores.saved - without.saved == 3 * scores * (4 + 4), "in float32, and once more for the products"
    assert with_scores.working > without.working


def test_a_kernel_of_attention_fills_heads_up_to_lanes():
    """Eight heads of 4 are held as eight of 128, in what is saved and in the layer that is differentiated."""
    lanes = replace(ACCELERATOR, lanes=LANES)
    step = small_step((1, 4, 2), model={"mlp": 16}, compute={"remat": "context"})
    assert estimate_memory(step, 0, lanes) == estimate_memory(step, 0, ACCELERATOR), "scores are no kernel"
    longer = replace(step, scores=False, rows=64 * step.rows)  # so that the loss is not what takes most
    filled, whole = (estimate_memory(longer, 0, backend) for backend in (lanes, ACCELERATOR))
    more = longer.tokens * 4 * (128 - 4) * 4  # float32, half of the heads
    assert (filled.saved - whole.saved, filled.working - whole.working) == (3 * more, 8 * more)
    assert TPU.lanes == LANES


LONG = 4096  # tokens of a row, so that scores take more than the loss


def beside_layers(microbatches=2, **changes) -> int:
    """Bytes that a TPU holds beside what an accelerator does, in a layer's backward pass, on two devices of `data`."""
    step = small_step((1, 2, 1), microbatches, {"remat": "full", "dtype": "bfloat16"})
    longer = replace(step, positions=LONG, **changes)
    tpu, other = (estimate_memory(longer, 0, backend) for backend in (TPU, ACCELERATOR))
    return tpu.working - other.working


def test_a_tpu_holds_casts_and_a_microbatch_beside_the_layers():
    """Weights in bfloat16, and the gradients of this microbatch's layers, which are not added to the others' yet."""
    cast, own = 2 * (3 * WEIGHTS + 2 * 320 * 32 + 32) // 2, 4 * 3 * WEIGHTS // 2
    assert beside_layers() == cast + own
    assert beside_layers(1) == cast, "of one microbatch they are the sums"
    assert beside_layers(per_step=True) == own, "what is gathered for the step was cast before"
    assert beside_layers(compute_bytes=4) == own


@pytest.mark.parametrize(("block", "width"), [(10**6, 2), (24, 4)])
def test_a_heads_gradient_waits_for_its_sum(block, width):
    """In float32 where several groups of tokens are added up."""
    step = replace(small_step((1, 2, 1), 2, {"remat": "full", "dtype": "bfloat16"}), positions=LONG, loss_block=block)
    waits, waited_for = (estimate_memory(replace(step, sums_behind=each), 0, TPU) for each in (True, False))
    assert waits.working - waited_for.working == width * 320 * 32


def test_gradients_for_several_replicas_fill_lanes():
    """Those whose last axis is split: embedding, norms, and what ends in `embed`; two replicas, two devices each."""
    one, two = (small_step(mesh, 2, {"remat": "full"}) for mesh in ((1, 2, 1), (2, 2, 1)))
    ends = 320 * 32 + 3 * 2 * 32 + 32 + 3 * (32 * 32 + 64 * 32)  # output and down, of three layers
    all_ = 3 * WEIGHTS + 2 * 320 * 32 + 32
    assert estimate_memory(one, 0, TPU).buffers == 4 * all_ // 2
    assert estimate_memory(two, 0, TPU).buffers == 4 * (all_ - ends) // 2 + 4 * ends * 128 // 32
    assert estimate_memory(two, 0, ACCELERATOR).buffers == 4 * all_ // 2


WIDE = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "head_size": 64, "mlp": 1024, "vocabulary": 4096}


def beside_frozen(base: str, **compute) -> Setup:
    others = {"adapter": LoraConfig(rank=16, targets=TARGETS, base=base), "start_from": "a model"}
    others["batch"] = BatchConfig(8, 256)
    return small_setup((1, 2, 1), 1, {"remat": "full", "loss_block": 256, **compute}, WIDE, others)


@pytest.mark.parametrize("base", ["dtype", "nf4"])
def test_frozen_weights_take_their_bits_and_have_no_gradients(base):
    setup = beside_frozen(base)
    matrices, others = 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024), 2 * 4096 * 256 + 9 * 256
    held = 4.25 / 8 * matrices if base == "nf4" else 4 * matrices
    assert tree_bytes(setup).frozen == (held + 4 * others) / 2
    found = estimate(setup, CPU)
    factors = 16 * 4 * (2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 1024))
    assert found.buffers == 4 * factors / 2
    if base == "dtype":  # XLA:CPU keeps several forms of the weights that it decodes
        low, high = CPU.range(found.peak)
        assert low < compiler_memory(lowered_step(setup).compile(compiler_options=FAST)).peak < high


def test_a_copy_takes_its_bytes_once():
    others = {"objective": DpoConfig(), "start_from": "a model", "batch": BatchConfig(8, 256)}
    compute = {"remat": "full", "loss_block": 256}
    setup, plain = (small_setup((1, 2, 1), 1, compute, WIDE, each) for each in (others, {"batch": others["batch"]}))
    copy, found = tree_bytes(setup).frozen, estimate(setup, CPU)
    assert copy == tree_bytes(setup).parameters
    assert found.peak - estimate(plain, CPU).peak == copy + 4 * (4096 + 1) * 256, "and what it gathers at once"
    assert found.peak == pytest.approx(
        compiler_memory(lowered_step(setup).compile(compiler_options=FAST)).peak, rel=0.05
    )


def test_muon_takes_what_its_matrices_take():
    """Of a step with few tokens the update is the peak: 8 layers on 4 devices, two whole matrices each at a time."""
    wide = {"layers": 8, "hidden": 256, "mlp": 1024}
    setup = small_setup((1, 4, 1), 1, {"remat": "full"}, wide, {"optimizer": MuonConfig(), "batch": BatchConfig(8, 16)})
    found = estimate(setup, CPU)
    assert found.update > found.saved + found.tables + found.working
    compiled = lowered_step(setup).compile(compiler_options=FAST)
    assert found.peak == pytest.approx(compiler_memory(compiled).peak, rel=0.05)
