import json
from dataclasses import replace
from importlib.resources import files

import pytest

from gregale.cost.chips import chip
from gregale.cost.hlo import parse, walk
from gregale.cost.pallas_cost import (
    PRODUCTS,
    TABLE,
    Kernel,
    Kernels,
    Pairs,
    grouped_of,
    kernel_of,
    quantising_of,
)
from gregale.scopes import visible

HEADS, HEAD_SIZE = 2, 128  # of the stored program's kernels of two blocks of 128, padded to a vector's lanes
CHIP = replace(chip("v5e"), flops_per_second=1e12)


@pytest.fixture(scope="module")
def sites(stored):
    return [site for site in walk(parse(stored("tpu_kernel")), {}) if "custom_call" in site.instruction.attributes]


def kernels(sites) -> list[Kernel]:
    return [kernel for site in sites if (kernel := kernel_of(site.frame.computation, site.instruction))]


def test_a_kernel_that_is_not_in_the_table_has_the_products_of_its_visible_blocks(sites):
    """JAX's own kernel, whose metadata do not count pairs: it has those of a causal mask."""
    block = 2 * 2 * HEADS * 128 * 128 * HEAD_SIZE / 1e12
    found = kernels(sites)
    assert {Kernels(CHIP).seconds(each) for each in found} == {3 * block}
    assert {(each.key, Kernels(CHIP).cycles(each)) for each in found} == {("splash_mha_fwd 128 128", None)}
    wide = Kernels(replace(CHIP, name="v7x"))
    assert wide.seconds(found[0]) == 6 * block, "filled up to the matrix unit"


def test_the_table_times_the_8b_examples_attention():
    """Two rows of 32 heads on a v5e, by hand of the bundles: forward 6.54 ms a layer, backward 14.66."""
    found, pairs = Kernels(chip("v5e")), Pairs.causal(8192, 2048, 64)
    assert pairs == Pairs(steps=64 * 10, outer=64 * 4, whole=64 * 6, diagonal=64 * 4)
    assert found.seconds(Kernel("splash_mha_fwd", 2048, 128, pairs)) == pytest.approx(6.54e-3, rel=0.005)
    of_groups = replace(pairs, outer=16 * 4)  # of the heads of keys
    assert found.seconds(Kernel("splash_mha_fused", 2048, 128, of_groups)) == pytest.approx(14.66e-3, rel=0.005)


def test_a_block_near_to_one_of_the_table_is_scaled():
    found = Kernels(chip("v6e"))
    pairs = Pairs(steps=0, outer=0, whole=1, diagonal=0)
    exact, near, far = (Kernel("splash_mha_fwd", size, 128, pairs) for size in (2048, 1536, 512))
    assert found.seconds(near) == pytest.approx(found.seconds(exact) * (1536 / 2048) ** 2)
    assert found.cycles(far) is None


def test_no_kernel_is_faster_than_its_products():
    """Of all chips in the table, with whole blocks and head sizes filled up."""
    for name, rows in json.loads(files("gregale.cost").joinpath(TABLE).read_text()).items():
        for key in rows:
            kind, block, head_size = key.split()
            pairs = Pairs(steps=1, outer=0, whole=1, diagonal=0, edge=0)
            kernel = Kernel(kind, int(block), int(head_size), pairs)
            measured, bound = Kernels(chip(name)).seconds(kernel), PRODUCTS[kind] * int(block) ** 2 * 2
            filled = -(-int(head_size) // 128) * 128
            assert measured > bound * filled / chip(name).flops_per_second, (name, key)


@pytest.mark.parametrize("window", [None, 1, 5, 9, 20])
def test_pairs_are_those_of_the_mask(window):
    pairs = sum(1 for i in range(9) for j in range(9) if j <= i and (window is None or i - j < window))
    assert visible(9, (window,)) == pairs
    assert visible(9, (window, 1, 1, None)) == (pairs + 9 + 9 + 45) / 4, "layers of several kinds"


BACKWARD = """HloModule jit_step, is_scheduled=true

ENTRY %main (q: bf16[4,2,64,128]) -> f32[] {
  %q = bf16[4,2,64,128] parameter(0)
  %mask = s8[1,2,2] parameter(1)
  %kernel = (f32[64,128], RESULTS) custom-call(%mask, %q), custom_call_target="tpu_custom_call", ATTRIBUTES
  ROOT %zero = f32[] constant(0)
}
"""


@pytest.mark.parametrize(
    ("name", "products"), [("splash_mha_fused", 5), ("splash_mha_dkv", 4), ("splash_mha_dq", 3), ("another_kernel", 0)]
)
def test_products_of_the_backward_kernels_by_the_pairs_in_their_metadata(name, products):
    counts = {"block_q": 32, "steps": 12, "outer": 4, "whole": 5, "diagonal": 6, "edge": 7}
    attributes = f'metadata={{op_name="jit(step)/{name}/pallas_call"}}, kernel={json.dumps(json.dumps(counts))}'
    text = BACKWARD.replace("RESULTS", "bf16[4,2,64,128]").replace("ATTRIBUTES", attributes)
    computation = parse(text).computations["main"]
    kernel = kernel_of(computation, computation.instructions["kernel"])
    assert (kernel is None) == (products == 0)
    found = 0 if kernel is None else Kernels(CHIP).seconds(kernel)
    assert found == pytest.approx(2 * products * (5 + 6 + 7) * 32 * 32 * 128 / 1e12)


@pytest.mark.parametrize(
    ("name", "numbers", "seconds"),
    [
        ("quantise_rows", "s8[16384,4096]", (2 + 1) * 2**26 / 819e9),
        ("gated_rows", "s8[16384,4096]", 11 * 2**16 / (197e12 / (2 * 4 * 128**2))),
        ("quantise_turned", "s8[4096,16384]", 8 * 2**16 / (197e12 / (2 * 4 * 128**2))),
    ],
)
def test_a_kernel_that_quantises_moves_its_bytes_or_runs_its_bundles(name, numbers, seconds):
    text = BACKWARD.replace("f32[64,128], RESULTS", f"{numbers}, f32[1,4096]").replace("4,2,64,128", "16384,4096")
    text = text.replace("%mask, ", "").replace("ATTRIBUTES", f'metadata={{op_name="jit(step)/{name}/pallas_call"}}')
    computation = parse(text).computations["main"]
    found = quantising_of(computation, computation.instructions["kernel"])
    assert found is not None
    assert Kernels(chip("v5e")).seconds(found) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "efficiency"), [("gmm", 1.09), ("tgmm", 1.33), ("int8_product", 0.70), ("sum_of_turned", 2.12)]
)
def test_experts_multiply_each_visited_block(name, efficiency):
    """1,024 rows are eight blocks of 128; four groups visit three of them twice."""
    out, last = "bf16[1024,64]", "bf16[4,256,64]"
    if name == "tgmm":
        out, last = last, out
    name = f"jit(step)/shard_map/jit({name})/pallas_call"
    text = f"""HloModule m

ENTRY %main {{
  %a = s32[] parameter(0)
  %b = s32[5]{{0}} parameter(1)
  %c = s32[11]{{0}} parameter(2)
  %x = bf16[1024,256]{{1,0}} parameter(3)
  %y = {last} parameter(4)
  ROOT %kernel = {out} custom-call(%a, %b, %c, %c, %a, %x, %y), custom_call_target="x", metadata={{op_name="{name}"}}
}}
"""
    computation = parse(text).computations["main"]
    found = grouped_of(computation, computation.instructions["kernel"])
    assert found is not None
    assert found.flops == pytest.approx(2 * 11 * 128 * 256 * 64 * efficiency)
    assert Kernels(CHIP).seconds(found) == found.flops / 1e12
    slow = replace(CHIP, memory_bytes_per_second=1e6)
    assert Kernels(slow).seconds(found) == found.bytes / 1e6
    assert found.bytes == 2 * (1024 * 256 + 1024 * 64 + 4 * 256 * 64) + 4 * (1 + 5 + 11 + 11 + 1)
