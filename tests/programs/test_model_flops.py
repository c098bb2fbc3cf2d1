"""FLOPs of a model for a token: `6 N + 12 * layers * heads * head_size * keys`, with N counted by hand."""

from dataclasses import replace

import pytest

from gregale.axes.layout import MappingConfig
from gregale.model.config import ExpertsConfig, LoraConfig
from gregale.model.llama import GemmaConfig, GptOssConfig
from gregale.objectives import DpoConfig
from gregale.optim import MuonConfig
from gregale.programs.plan.step import step_work
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.model_flops import model_flops
from tests.cost.steps import small_setup

ATTENTION, MLP, HEAD = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 64, 32 * 320  # of the small model, whose layers are 3
EXPERTS = ExpertsConfig(8, 2, width=16, shared=24)
ROUTED = 8 * 32 + 3 * 32 * (24 + 2 * 16)  # the router, the MLP beside the experts, and two of eight
ALL_PAIRS = 12 * 3 * 32 * 16
VISIBLE = (1 + 16) / 2 / 16
PLAIN = {"loss_block": 512, "autodiff_rules": "plain", "attention": "xla"}
WINDOW = (1 + 2 + 3 + 4 * 13) / 16 / 16
ADAPTED = {"adapter": LoraConfig(rank=4, targets=("query", "down")), "start_from": "a model"}


def flops(*arguments, **changes) -> tuple[float, float]:
    found = model_flops(small_setup(*arguments, **changes))
    return found.visible - ALL_PAIRS * VISIBLE, found.full - ALL_PAIRS


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, 6 * (3 * (ATTENTION + MLP) + HEAD)),
        ({"model": {"tied_head": True}}, 6 * (3 * (ATTENTION + MLP) + HEAD)),
        ({"model": {"experts": EXPERTS}}, 6 * (3 * (ATTENTION + ROUTED) + HEAD)),
        (
            {"model": {"experts": EXPERTS}, "others": {"mapping": MappingConfig(compute={"experts": "data"})}},
            6 * (3 * (ATTENTION + ROUTED) + HEAD),
        ),
        # A gradient by the head, which nothing needs, is left out; by the first layer's inputs, too.
        ({"others": ADAPTED}, 4 * (3 * (ATTENTION + MLP) + HEAD) + 6 * 3 * 4 * (32 + 32 + 64 + 32)),
        ({"compute": {"remat": "full", "matmul": "int8", "loss_block": 7}}, 6 * (3 * (ATTENTION + MLP) + HEAD)),
    ],
    ids=["dense", "tied", "experts", "exchanged experts", "adapters", "whatever the program does"],
)
def test_by_hand(arguments, expected):
    for found in flops((1, 2, 1), **arguments):
        assert found == pytest.approx(expected, rel=0.01)


def test_weights_in_blocks_are_multiplied_as_others():
    wide = {"hidden": 128, "head_size": 32, "heads": 4, "kv_heads": 2}
    adapters = (LoraConfig(rank=4, targets=("query", "down"), base=base) for base in ("dtype", "nf4"))
    exact, four = (
        model_flops(small_setup((1, 2, 1), compute={"remat": "full"}, model=wide, others={**ADAPTED, "adapter": each}))
        for each in adapters
    )
    assert exact == four


def test_a_comparison_has_a_forward_pass_more():
    """And computes the logits of the policy again for their gradients."""
    own = model_flops(small_setup((1, 1, 1)))
    pairs = model_flops(small_setup((1, 1, 1), others={"objective": DpoConfig(), "start_from": "a model"}))
    assert pairs.full == pytest.approx(own.full * 4 / 3 + 2 * HEAD, rel=0.01)


def test_windows_hide_more_and_the_largest_logits_of_a_step_do_not_count():
    others = {"optimizer": MuonConfig(qk_clip=50.0)}
    windowed = model_flops(small_setup((1, 1, 1), model={"sliding_window": 4, "full_layers": (2,)}, others=others))
    own = model_flops(small_setup((1, 1, 1)))
    assert windowed.full == pytest.approx(own.full)
    assert own.visible - windowed.visible == pytest.approx(ALL_PAIRS * (VISIBLE - WINDOW) * 2 / 3)


@pytest.mark.parametrize("kind", [GemmaConfig, GptOssConfig])
def test_other_families(kind):
    setup = small_setup((1, 1, 1))
    changes = {"experts": replace(EXPERTS, shared=None)} if kind is GptOssConfig else {"mlp": 64}
    model = kind(layers=4, hidden=32, heads=8, kv_heads=4, head_size=4, vocabulary=320, **changes)
    found = model_flops(set_up(replace(setup.config, model=model), 257, setup.layout.mesh))
    inner = MLP if kind is GemmaConfig else 8 * 32 + 3 * 32 * 2 * 16
    assert found.full == pytest.approx(6 * (4 * (ATTENTION + inner) + HEAD) + ALL_PAIRS * 4 / 3, rel=0.01)


def test_a_step_computes_more_than_its_model():
    """Recomputation, and what the mask hides; on a mesh as much as on one device."""
    tokens = 32 * 16
    one, full, split = (
        step_work(
            small_setup(mesh, 1, {"remat": remat, "loss_block": 512, "autodiff_rules": "plain", "attention": "xla"})
        )
        for mesh, remat in (((1, 1, 1), "none"), ((1, 1, 1), "full"), ((2, 2, 2), "none"))
    )
    model = model_flops(small_setup((1, 1, 1)))
    assert one.flops == pytest.approx(model.full * tokens, rel=0.01)
    assert split.flops == pytest.approx(one.flops, rel=0.01)
    again = 2 * 3 * (ATTENTION + MLP - 32 * 64) + 4 * 3 * 32 * 16  # without the last product of a layer
    assert full.flops - one.flops == pytest.approx(again * tokens, rel=0.02)
    assert not one.unknown
