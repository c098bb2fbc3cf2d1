import pytest

from gregale.audit.call_graph import walk
from gregale.audit.hlo import parse
from gregale.audit.pallas_cost import Peak, visible

HEADS, POSITIONS, HEAD_SIZE = 2, 256, 128  # of the stored program's kernels, padded to a vector's lanes
PAIRS = 256 * 257 / 2


@pytest.fixture(scope="module")
def sites(stored):
    return [site for site in walk(parse(stored("tpu_kernel")), {}) if "custom_call" in site.instruction.attributes]


def seconds(sites, window=None) -> set[float]:
    peak = Peak(1e12, (window,))
    return {peak.seconds(site.frame.computation, site.instruction) for site in sites} - {0.0}


def test_a_forward_kernel_has_two_products_of_what_is_seen_and_a_window_hides_pairs(sites):
    assert seconds(sites) == {2 * 2 * HEADS * PAIRS * HEAD_SIZE / 1e12}
    assert seconds(sites, 1) == {2 * 2 * HEADS * POSITIONS * HEAD_SIZE / 1e12}
    assert seconds(sites, POSITIONS) == seconds(sites)


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
    ("name", "results", "products"),
    [("splash_mha_dkv", 3, 5), ("splash_mha_dkv", 2, 4), ("splash_mha_dq", 1, 3), ("another_kernel", 3, 0)],
)
def test_products_of_the_backward_kernels(name, results, products):
    """One that gives three gradients is fused."""
    attributes = f'metadata={{op_name="jit(step)/{name}_segmented_no_residuals/pallas_call"}}'
    text = BACKWARD.replace("RESULTS", ", ".join(["bf16[4,2,64,128]"] * results)).replace("ATTRIBUTES", attributes)
    computation = parse(text).computations["main"]
    found = Peak(1e12).seconds(computation, computation.instructions["kernel"])
    assert found == pytest.approx(2 * products * 4 * 2 * (64 * 65 / 2) * 128 / 1e12)
