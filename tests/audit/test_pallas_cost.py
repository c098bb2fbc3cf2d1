import json
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from gregale.audit.call_graph import walk
from gregale.audit.chips import chip
from gregale.audit.hlo import parse
from gregale.audit.pallas_cost import PRODUCTS, TABLE, Kernel, Kernels, kernel_of, visible

HEADS, HEAD_SIZE = 2, 128  # of the stored program's kernels of two blocks of 128, padded to a vector's lanes
CHIP = replace(chip("v5e"), flops_per_second=1e12)


@pytest.fixture(scope="module")
def sites(stored):
    return [site for site in walk(parse(stored("tpu_kernel")), {}) if "custom_call" in site.instruction.attributes]


def seconds(sites, window=None) -> set[float]:
    return {Kernels(CHIP, 1, (window,)).seconds(kernel) for kernel in kernels(sites)}


def kernels(sites) -> list[Kernel]:
    return [kernel for site in sites if (kernel := kernel_of(site.frame.computation, site.instruction))]


def test_a_kernel_that_is_not_in_the_table_has_the_products_of_its_visible_blocks(sites):
    block = 2 * 2 * HEADS * 128 * 128 * HEAD_SIZE / 1e12
    assert seconds(sites) == seconds(sites, 256) == {3 * block}
    assert seconds(sites, 1) == {2 * block}, "a window hides a block"
    assert {(each.key, *Kernels(CHIP).lengths(each)) for each in kernels(sites)} == {("splash_mha_fwd 128x128 128",)}
    wide = Kernels(replace(CHIP, name="v7x"))
    assert wide.seconds(Kernel("splash_mha_fwd", 2, 256, 128, 128, 128)) == 6 * block, "filled up to the matrix unit"


@pytest.mark.parametrize("name", ["splash_mha_fwd", "splash_mha_fused"])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (4, 8), (8, 2)])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 13, 99])
def test_a_grid_has_the_blocks_of_the_mask(name, queries, keys, window):
    i, j = np.indices((24, 24))
    mask = (j <= i) & (i - j < (window or 24))
    blocks = mask.reshape(24 // queries, queries, 24 // keys, keys).any((1, 3))
    blocks = blocks if name.endswith("fwd") else blocks.T
    steps = len(blocks) * blocks.sum(1).max()
    assert Kernel(name, 1, 24, 128, queries, keys).grid(window) == (steps, len(blocks), blocks.sum())


def test_the_table_times_the_8b_examples_attention():
    """Two rows of 32 heads on a v5e; by hand, of the compiler's bundles: forward 8.12 ms a layer, backward 18.3."""
    found = Kernels(chip("v5e"))
    assert found.seconds(Kernel("splash_mha_fwd", 64, 8192, 128, 1024, 1024)) == pytest.approx(8.12e-3, rel=0.02)
    assert found.seconds(Kernel("splash_mha_fused", 64, 8192, 128, 1024, 2048)) == pytest.approx(18.3e-3, rel=0.02)


def test_no_kernel_is_faster_than_its_products():
    """Of all chips in the table, with whole blocks and head sizes filled up."""
    for name, rows in json.loads(files("gregale.audit").joinpath(TABLE).read_text()).items():
        for key in rows:
            kind, sizes, head_size = key.split()
            queries, keys = map(int, sizes.split("x"))
            kernel = Kernel(kind, 1, max(queries, keys), int(head_size), queries, keys)
            measured, bound = Kernels(chip(name)).seconds(kernel), PRODUCTS[kind] * queries * keys * 2
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


SUMS, BY_KEYS, BY_QUERIES = "f32[4,64,128]", "bf16[4,2,64,128]", "bf16[1,4,2,64,128]"


@pytest.mark.parametrize(
    ("name", "results", "products"),
    [
        ("splash_mha_dkv", [BY_QUERIES, BY_KEYS, BY_KEYS], 5),
        ("splash_mha_dkv", [SUMS, BY_KEYS, BY_KEYS], 4),
        ("splash_mha_dq", [BY_KEYS], 3),
        ("another_kernel", [BY_QUERIES, BY_KEYS, BY_KEYS], 0),
    ],
)
def test_products_of_the_backward_kernels(name, results, products):
    """One that also gives the gradients by queries, for each block of keys, is fused."""
    attributes = f'metadata={{op_name="jit(step)/{name}_segmented_no_residuals/pallas_call"}}'
    text = BACKWARD.replace("RESULTS", ", ".join(results)).replace("ATTRIBUTES", attributes)
    computation = parse(text).computations["main"]
    kernel = kernel_of(computation, computation.instructions["kernel"])
    assert (kernel is None) == (products == 0)
    found = 0 if kernel is None else Kernels(CHIP).seconds(kernel)
    assert found == pytest.approx(2 * products * 4 * 2 * 64 * 64 * 128 / 1e12), "one block"
