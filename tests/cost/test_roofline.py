from dataclasses import replace

import haliax as hax
import jax
import pytest

from gregale.axes.parameters import trainable
from gregale.cost.chips import chip
from gregale.cost.roofline import Work, model_flops_per_token, roofline, work_of
from gregale.model.config import ExpertsConfig, LoraConfig
from gregale.model.execution import execution
from gregale.objectives import DpoConfig
from gregale.programs.plan.estimates import abstract_batch, step_shape
from gregale.runs.config import BatchConfig
from tests.cost.steps import flops_of, small_setup, small_step

WORK = Work(model_flops=3e12, flops=4e12, memory_bytes=1e9, link_bytes={"inside slice": 2e9, "between slices": 1e8})


def test_the_slowest_resource_bounds_the_step():
    v5p = chip("v5p")
    found = roofline(WORK, v5p, 1, None)
    assert found.compute == 4e12 / 459e12
    assert found.memory == 1e9 / 2765e9
    assert found.links == {"inside slice": 2e9 / 600e9, "between slices": 1e8 / 6.25e9}
    assert found.overlapped == max(found.compute, *found.links.values())
    assert found.one_after_another == found.compute + sum(found.links.values())


def test_utilisation_has_two_definitions_and_is_never_above_one():
    bound = roofline(replace(WORK, full_flops=3.5e12), chip("v5p"), 1, None)
    found = bound.utilisation(seconds=0.01)
    assert found == pytest.approx({"utilisation": 3e12 / 459e10, "utilisation_full_attention": 3.5e12 / 459e10})
    assert bound.utilisation(3e12 / 459e12) == {"utilisation": 1.0, "utilisation_full_attention": None}


def test_a_long_context_exceeds_the_peak_with_full_attention_alone():
    """A kernel skips what the mask hides, so that the visible pairs are computed and all pairs are not."""
    step = replace(small_step((1, 1, 1), compute={"remat": "none"}), scores=False, positions=100_000)
    bound = roofline(work_of(step, 0, {}), chip("v5e"), 1, None)
    found = bound.utilisation(bound.compute)
    assert 0.8 < found["utilisation"] < 1
    assert found["utilisation_full_attention"] is None


def test_a_given_link_replaces_the_chips_own_and_parts_of_a_chip_share_it():
    v7x = chip("v7x")
    assert roofline(WORK, v7x, 2, 1e6).links["between slices"] == 100
    assert roofline(WORK, v7x, 2, None).compute == 2 * roofline(WORK, v7x, 1, None).compute
    unpublished = replace(v7x, network_bytes_per_second=None)
    assert "between slices" not in roofline(WORK, unpublished, 2, None).links


def test_products_of_8_bit_numbers_take_half_the_time():
    """All of the layers' products and their recomputation, but neither attention nor the head."""
    v5e, plain = chip("v5e"), small_step((1, 1, 1), compute={"remat": "projections"})
    layers = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32)
    for remat, passes in {"projections": 6, "full": 8}.items():
        work, eight = (work_of(replace(plain, remat=remat, matmul=name), 0, {}) for name in ("dtype", "int8"))
        recomputed = layers - 3 * 32 * 64  # without the last product of a layer
        products = (6 * layers + 2 * recomputed * (passes == 8)) * plain.rows * plain.positions
        assert (work.flops, work.model_flops) == (eight.flops, eight.model_flops)
        saved = roofline(work, v5e, 1, None).compute - roofline(eight, v5e, 1, None).compute
        assert saved == pytest.approx(products / 2 / 197e12)


def test_gradients_of_experts_weights_are_no_products_of_8_bit_numbers():
    step = small_step((1, 1, 1), model={"experts": ExpertsConfig(8, 2, width=16)}, compute={"remat": "projections"})
    work, experts = work_of(replace(step, matmul="int8"), 0, {}), 3 * 2 * 3 * 32 * 16
    all_products = 6 * sum(map(step.active_values, step.stacked()))
    assert work.eight_bit_flops == (all_products - 2 * experts) * step.rows * step.positions


def test_flops_by_hand():
    """Three layers: 6 FLOPs for each weight that is multiplied, and attention over the visible of 16 positions."""
    step = small_step((2, 2, 2), compute={"remat": "full"})
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    weights = 3 * layer + 32 * 320 + 32
    assert model_flops_per_token(step) == 6 * weights + 12 * 3 * 32 * (1 + 16) / 2
    assert model_flops_per_token(step, full=True) == 6 * weights + 12 * 3 * 32 * 16
    windowed = replace(step, windows=(4,))
    assert model_flops_per_token(windowed) == 6 * weights + 12 * 3 * 32 * (1 + 2 + 3 + 4 * 13) / 16


def test_a_token_is_multiplied_by_its_own_experts_alone():
    """Two of eight, an MLP beside them, and a router of eight columns; memory holds all."""
    experts = ExpertsConfig(8, 2, width=16, shared=24)
    step = small_step((2, 2, 2), compute={"remat": "full"}, model={"experts": experts})
    attention, beside = 2 * 32 * 32 + 2 * 32 * 16 + 2 * 32, 8 * 32 + 3 * 32 * 24
    rest, expert = attention + beside, 3 * 32 * 16
    assert step.parameters == 3 * (rest + 8 * expert) + 2 * 32 * 320 + 32
    assert step.active_parameters == step.parameters - 3 * 6 * expert
    once = 6 * (step.active_parameters - 32 * 320) + 12 * 3 * 32 * (1 + 16) / 2
    assert model_flops_per_token(step) == once
    recomputed = 2 * 3 * (rest + 2 * expert - 32 * 24 - 2 * 16 * 32)  # without products by down
    masked = 12 * 3 * 32 * (16 - 17 / 2) + 4 * 3 * 32 * 16
    work = work_of(step, 0, {})
    tokens = step.rows * step.positions / 8
    padding = 6 * (320 * 32 + 32) * (step.loss_blocks.tokens / step.tokens - 1)
    assert work.flops == pytest.approx((once + masked + recomputed + padding) * tokens)


@pytest.mark.parametrize(
    ("rules", "policies", "norms", "model"),
    [
        ("plain", "projections context full", "before", 1),
        ("auto", "context", "before", 1),
        ("plain", "context", "after", 1),
        ("plain", "context", "before", 2),
    ],
)
def test_what_is_computed_again_is_what_the_traced_step_has(rules, policies, norms, model):
    """By the matrix products in JAX's trace; the CPU's rule of attention keeps what a kernel keeps."""

    def again(remat):
        compute = {"remat": remat, "autodiff_rules": rules}
        setup = small_setup((1, 1, model), 1, compute, {"layers": 1, "norms": norms})
        step = replace(step_shape(setup), scores=rules == "plain")
        return flops_of(traced_loss(setup)), model * work_of(step, 0, {}).flops

    traced, counted = again("none")
    for remat in policies.split():
        more_traced, more_counted = again(remat)
        assert more_traced - traced == pytest.approx(more_counted - counted, rel=0.02, abs=0.01 * traced), remat


def traced_loss(setup, **changes):
    run = replace(execution(setup.config.compute, setup.layout, setup.config.model), **changes)

    def loss(parameters, frozen, batch):
        held = setup.psdp.holding(frozen)
        model = held.model_with(parameters)
        return model.loss(batch, run)[0] if held.reference is None else held.loss(model, batch, frozen)[0]

    with hax.axis_mapping({}):
        arguments = trainable(setup.model), setup.frozen, abstract_batch(setup)
        return jax.make_jaxpr(jax.grad(loss))(*arguments).jaxpr


def test_what_saves_more_reads_weights_no_oftener():
    """So that of two policies on a step that memory bounds, the one that computes less is not the slower one."""
    policies = ("none", "projections", "context", "full")
    work = [work_of(small_step((2, 2, 2), compute={"remat": remat}), 0, {}) for remat in policies]
    assert [each.memory_bytes for each in work] == sorted(each.memory_bytes for each in work)
    assert work[-1].memory_bytes > work[0].memory_bytes
    assert [each.flops for each in work] == sorted(each.flops for each in work)


def test_what_goes_to_the_host_crosses_its_link_twice():
    offload, full = (work_of(small_step((2, 2, 2), compute={"remat": remat}), 0, {}) for remat in ("offload", "full"))
    carries = 2 * 3 * (4 * 16 * 32) * 4
    assert (offload.host_bytes, full.host_bytes) == (2 * carries, 0)
    assert offload.flops == full.flops
    v5e = chip("v5e")
    found = roofline(offload, v5e, 1, None)
    assert found.host == 2 * carries / v5e.host_bytes_per_second
    assert found.one_after_another == max(found.compute, found.memory) + found.host
    assert found.overlapped == max(found.compute, found.memory, found.host)


def test_a_kernel_leaves_out_what_the_mask_hides():
    compute = {"remat": "none", "loss_block": 512}  # no padding of the loss
    step = replace(small_step((1, 1, 1), compute=compute), scores=False)
    pairs = 2 * 2 * 3 * 32 * 32 * 16  # two products of 2 FLOPs, three layers, heads of 32 together, tokens of a step
    counted = work_of(step, 0, {})
    assert counted.model_flops - counted.flops == pytest.approx(pairs * (3 - 3.5) * (1 + 16) / 2)
    assert counted.full_flops - counted.flops == pytest.approx(pairs * (3 * 16 - 3.5 * (1 + 16) / 2))
    windowed = work_of(replace(step, windows=(4,)), 0, {})
    assert counted.flops - windowed.flops == pytest.approx(pairs * 3.5 * (8.5 - (1 + 2 + 3 + 4 * 13) / 16))
    assert work_of(replace(step, windows=(99,)), 0, {}).flops == counted.flops
    mixed = small_step((1, 1, 1), compute=compute, model={"sliding_window": 4, "full_layers": (2,)})
    mixed = work_of(replace(mixed, scores=False), 0, {})
    assert counted.flops - mixed.flops == pytest.approx(2 / 3 * (counted.flops - windowed.flops)), "two of three layers"


def test_the_optimizers_products_are_computed_but_are_not_the_models():
    without, with_them = (work_of(small_step((2, 2, 2)), 0, {}, update_flops=update) for update in (0, 1e9))
    assert with_them.flops == without.flops + 1e9
    assert with_them.model_flops == without.model_flops


def test_model_flops_are_the_traced_products_where_nothing_is_computed_again():
    """An independent count: forward and backward pass by JAX's own trace; norms have no products."""
    setup = small_setup((1, 1, 1), 1, {"remat": "none", "autodiff_rules": "plain"}, {"layers": 2})
    tokens = setup.config.batch.tokens
    counted, attention = model_flops_per_token(step_shape(setup), full=True), 12 * 2 * 32 * 16
    assert flops_of(traced_loss(setup)) == pytest.approx(counted * tokens, rel=0.01)
    others = {"adapter": LoraConfig(rank=4, targets=("query", "down")), "start_from": "a model"}
    beside = small_setup((1, 1, 1), 1, {"remat": "none", "autodiff_rules": "plain"}, {"layers": 2}, others)
    adapters, head = 2 * 4 * (32 + 32 + 64 + 32), 32 * 320
    by_hand = 2 / 3 * (counted - 6 * head - attention) + attention + 4 * head + 6 * adapters
    assert model_flops_per_token(step_shape(beside), full=True) == pytest.approx(by_hand, rel=1e-3)
    untaken = 2 * head  # the trace has the head's gradient, which no result needs
    assert flops_of(traced_loss(beside)) == pytest.approx((by_hand + untaken) * tokens, rel=0.01)
    others = {"objective": DpoConfig(), "start_from": "a model"}
    compute = {"remat": "none", "autodiff_rules": "plain", "loss_block": 512}
    step = step_shape(pairs := small_setup((1, 1, 1), 1, compute, {"layers": 2}, others))
    assert model_flops_per_token(step, full=True) == pytest.approx(counted * 4 / 3, rel=1e-3), "a pass more"
    again = 2 * head * tokens  # gradients of log-likelihoods compute the logits again
    assert flops_of(traced_loss(pairs)) == pytest.approx(counted * 4 / 3 * tokens + again, rel=0.01)
    assert work_of(step, 0, {}).flops == pytest.approx(counted * 4 / 3 * tokens + again, rel=0.01)
    tied = small_setup((1, 1, 1), 1, model={"layers": 2, "tied_head": True})
    assert model_flops_per_token(step_shape(tied), full=True) == counted, "a tied table is multiplied, too"


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("hidden", [1152, 1536, 1600, 2304, 2560])
def test_the_losss_padding_is_counted(hidden, fused):
    """At widths whose groups are no powers of two, 20,000 tokens on a device; the head has nearly all products."""
    model = {"layers": 1, "hidden": hidden, "vocabulary": 100_000}
    compute = {"dtype": "bfloat16", "loss_block": 1024, "remat": "none", "autodiff_rules": "plain"}
    setup = small_setup((1, 1, 1), 1, compute, model, {"batch": BatchConfig(200, 100)})
    step = replace(step_shape(setup), fuses_logits=fused)
    counted = work_of(step, 0, {})
    assert counted.flops == pytest.approx(flops_of(traced_loss(setup, fused_logits=fused)), rel=0.002)
    assert counted.flops < 1.04 * counted.full_flops
