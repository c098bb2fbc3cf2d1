from dataclasses import replace

import haliax as hax
import jax
import pytest

from gregale.audit.chips import chip
from gregale.audit.roofline import Work, model_flops_per_token, roofline, work_of
from gregale.model.execution import execution
from gregale.programs.plan.shapes import abstract_batch, step_shape
from tests.audit.steps import flops_of, small_setup, small_step

WORK = Work(model_flops=3e12, flops=4e12, memory_bytes=1e9, link_bytes={"inside slice": 2e9, "between slices": 1e8})


def test_the_slowest_resource_bounds_the_step():
    v5p = chip("v5p")
    found = roofline(WORK, v5p, 1, None)
    assert found.compute == 4e12 / 459e12
    assert found.memory == 1e9 / 2765e9
    assert found.links == {"inside slice": 2e9 / 600e9, "between slices": 1e8 / 6.25e9}
    assert found.overlapped == max(found.compute, *found.links.values())
    assert found.one_after_another == found.compute + sum(found.links.values())
    assert found.mfu_bound == pytest.approx(3e12 / 459e12 / found.overlapped)


def test_a_given_link_replaces_the_chips_own_and_parts_of_a_chip_share_it():
    v7x = chip("v7x")
    assert roofline(WORK, v7x, 2, 1e6).links["between slices"] == 100
    assert roofline(WORK, v7x, 2, None).compute == 2 * roofline(WORK, v7x, 1, None).compute
    unpublished = replace(v7x, network_bytes_per_second=None)
    assert "between slices" not in roofline(WORK, unpublished, 2, None).links


@pytest.mark.parametrize(
    ("rules", "policies", "norms"),
    [("plain", "projections context full", "before"), ("auto", "context", "before"), ("plain", "context", "after")],
)
def test_what_is_computed_again_is_what_the_traced_step_has(rules, policies, norms):
    """By the matrix products in JAX's trace; the CPU's rule of attention keeps what a kernel keeps."""

    def again(remat):
        setup = small_setup((1, 1, 1), 1, {"remat": remat, "autodiff_rules": rules}, {"layers": 1, "norms": norms})
        step = replace(step_shape(setup), scores=rules == "plain")
        return flops_of(traced_loss(setup)), work_of(step, 0, {}).flops

    traced, counted = again("none")
    for remat in policies.split():
        more_traced, more_counted = again(remat)
        assert more_traced - traced == pytest.approx(more_counted - counted, rel=0.02, abs=0.01 * traced), remat


def traced_loss(setup):
    run = execution(setup.config.compute, setup.layout, setup.config.model)

    def loss(model, batch):
        return model.loss(batch, run)[0]

    with hax.axis_mapping({}):
        return jax.make_jaxpr(jax.grad(loss))(setup.model, abstract_batch(setup)).jaxpr


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
    step = replace(small_step((1, 1, 1), compute={"remat": "none"}), scores=False)
    pairs = 2 * 2 * 3 * 32 * 32 * 16  # two products of 2 FLOPs, three layers, heads of 32 together, tokens of a step
    counted = work_of(step, 0, {})
    assert counted.model_flops - counted.flops == pytest.approx(pairs * (3 * 16 - 3.5 * (1 + 16) / 2))
    windowed = work_of(replace(step, windows=(4,)), 0, {})
    assert counted.flops - windowed.flops == pytest.approx(pairs * 3.5 * (8.5 - (1 + 2 + 3 + 4 * 13) / 16))
    assert work_of(replace(step, windows=(99,)), 0, {}).flops == counted.flops
    mixed = small_step((1, 1, 1), compute={"remat": "none"}, model={"sliding_window": 4, "full_layers": (2,)})
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
    counted = model_flops_per_token(step_shape(setup))
    assert flops_of(traced_loss(setup)) == pytest.approx(counted * tokens, rel=0.01)
    tied = small_setup((1, 1, 1), 1, model={"layers": 2, "tied_head": True})
    assert model_flops_per_token(step_shape(tied)) == counted, "a tied table is multiplied, too"
