"""`gregale plan` of DiLoCo: its programs, what they send, its memory, and the methods side by side."""

import json

import jax
import pytest

from gregale.cli import main
from gregale.cost.collectives import BETWEEN, INSIDE
from gregale.cost.roofline import Roofline
from gregale.methods.config import DilocoConfig, PsdpConfig, StreamingDilocoConfig, compared
from gregale.programs.plan.estimates import tree_bytes
from gregale.programs.plan.report import methods_of, report_of
from tests.programs.plans import FOUR_BITS, QUICKSTART, SMALL, config_of, plan_of, setup_of

TWO_AXES = ["--mesh.data=4", "--mesh.model=1"]  # quicker to compile than with tensor parallelism
STREAMING = [*TWO_AXES, "--sync.type=streaming_diloco", "--sync.period=8", "--sync.fragments=3"]
DILOCO = ["--sync.type=diloco", "--sync.period=5"]
ISLANDS = ["--mesh.island=2", "--mesh.data=2", "--mesh.model=1"]
CASES = {
    "diloco": ([*DILOCO, "--sync.warmup_steps=2"], {"step", "synchronise", "warm_up"}),
    "tau 1": ([*STREAMING, "--sync.delay=1"], {"step", "send_and_apply"}),
    "tau 2": ([*STREAMING, "--sync.delay=2"], {"step", "send", "apply"}),
    "islands, four bits": ([*DILOCO, *ISLANDS, *FOUR_BITS], {"step", "synchronise"}),
}


def bytes_a_step(setup) -> tuple[float, float]:
    traffic = setup.method.traffic()
    return traffic.average, traffic.most


@pytest.fixture(scope="module")
def plans():
    """The plan of each case, compiled when first asked for."""
    found = {}

    def plan(case: str):
        if case not in found:
            found[case] = plan_of(config_of(*CASES[case][0]))
        return found[case]

    return plan


def over(plan, program: str, axis: str):
    """The collectives of a program over an axis."""
    return plan.programs[program].audit.over(axis)


@pytest.mark.parametrize("case", [case for case in CASES if case != "tau 1"])  # its legs are those of `tau 2`
def test_every_program_is_reported_and_sends_what_the_method_says(plans, case):
    """To the byte over the axis that joins the replicas."""
    plan, method = plans(case), plans(case).setup.method
    report = report_of(plan, 257, None)
    assert json.loads(json.dumps(report)) == report
    assert report["programs"].keys() == CASES[case][1]
    assert report["collectives"] == report["programs"]["step"]["collectives"]
    transfers = [over(plan, name, method.axis) for name in plan.programs if name != "warm_up"]
    joining = [each for program in transfers for each in program]
    assert joining
    assert not [each for each in joining if each.loop]
    assert {each.dtype for each in joining} == ({"u8"} if "four bits" in case else {"f32"})
    assert plan.step.audit.over("data"), "the check finds what is there"
    assert plan.step.audit.over(method.axis) == ()
    # The largest program sends the method's peak: each array's collectives; scalars are smaller than any.
    sent = [sum(each.bytes_sent for each in of if each.axes == (method.axis,) and each.bytes > 48) for of in transfers]
    flags = 2 * ("four bits" in case)  # bytes that say whether values were finite, too small for the list above
    assert max(sent) + flags == bytes_a_step(plan.setup)[1]
    peaks = {name: program.memory.peak for name, program in plan.programs.items()}
    assert plan.step.memory.arguments == tree_bytes(plan.setup).arguments
    assert report["memory"]["peak"] == max(peaks.values()) == peaks[report["memory"]["peak_program"]]


@pytest.mark.parametrize("case", CASES)
def test_average_is_what_the_method_counts(case):
    setup = setup_of(*CASES[case][0])
    method, period = setup.method, setup.method.schedule.period
    average, peak = bytes_a_step(setup)
    counted = [method.bytes_sent(step) - method.bytes_sent(step - 1) for step in range(2 * period, 3 * period)]
    assert average * period == pytest.approx(sum(counted), abs=1e-6)
    if method.schedule.delay < 2:
        assert peak == max(counted)


def test_methods_send_what_the_configured_codecs_make_of_a_parameter():
    """The links of the compared methods, too: 4 bits, and a scale of 16 for 64 values, in place of 32 bits."""
    exact, four = setup_of(), setup_of(*FOUR_BITS)
    for setup in (exact, four):
        every_step = compared(setup.config.sync, 3)["psdp"].traffic(setup.method_context)
        assert (every_step.average, every_step.most) == (setup.psdp.bytes_sent(1), setup.psdp.bytes_sent(1))
    assert four.config.reduce.bytes_per_parameter(2) == (4 + 16 / 64) / 8
    bound = Roofline(compute=1e-3, memory=0.0, links={INSIDE: 0.0, BETWEEN: 0.0}, model=1e-3)
    bandwidth = 1e6
    found = {name: methods_of(setup, bound, bandwidth) for name, setup in (("none", exact), ("int4", four))}
    for name, each in found["none"].items():
        assert found["int4"][name]["needed_gbit_per_second"] < each["needed_gbit_per_second"]
        assert found["int4"][name]["utilisation"] > each["utilisation"]
    scale = exact.config.reduce.bytes_per_parameter(2) / four.config.reduce.bytes_per_parameter(2)
    as_exact = methods_of(exact, bound, bandwidth * scale)
    for name, each in found["int4"].items():
        assert each["utilisation"] == pytest.approx(as_exact[name]["utilisation"]), "as over so much wider a link"


@pytest.mark.parametrize("arguments", [DILOCO, [*STREAMING, "--sync.delay=2"], [*DILOCO, *ISLANDS]])
def test_memory_by_tree_is_that_of_the_arrays(arguments):
    setup = setup_of(*arguments)
    state, first = setup.initial_state(), jax.devices("cpu")[0]

    def on_first(tree) -> int:
        shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
        return sum(shard.data.nbytes for shard in shards if shard.device == first)

    trees, method = tree_bytes(setup), state.method
    assert trees.parameters == on_first(method.inner.parameters)
    assert trees.optimizer == on_first((method.inner.sharded, method.inner.gathered))
    assert trees.outer_parameters == on_first(method.outer.parameters)
    assert trees.outer_optimizer == on_first(method.outer.optimizer)
    assert trees.counters == on_first((state.step, state.skipped, state.skipped_in_a_row, method.seen, method.step))
    assert trees.state == on_first(state)
    sizes = setup.layout.mesh.shape
    assert trees.outer_parameters * sizes["replica"] * sizes["island"] == trees.parameters, "a share of them each"


def test_link_bytes_are_spread_over_the_period(plans):
    """The parameters' as the method counts them, and inside a replica those of a step of its own."""
    plan = plans("diloco")
    found, period = plan.link_bytes, plan.setup.method.schedule.period
    assert found[BETWEEN] == plan.setup.method.bytes_sent(period) / period
    own = sum(each.bytes_sent * each.counted for each in plan.step.audit.collectives if each.link == INSIDE)
    assert own <= found[INSIDE] < 1.1 * own
    assert {name: program.share for name, program in plan.programs.items()} == {
        "step": 1,
        "synchronise": 1 / period,
        "warm_up": 0,
    }


def test_what_the_configuration_does_not_name_has_defaults():
    default = StreamingDilocoConfig()
    for sync, configured in [
        (PsdpConfig(), "psdp"),
        (DilocoConfig(period=7), "diloco"),
        (StreamingDilocoConfig(period=9, fragments=2, delay=0), "streaming"),
        (StreamingDilocoConfig(period=9, fragments=2, delay=4), "streaming_overlap"),
    ]:
        found = compared(sync, layers=8)
        assert [name for name, each in found.items() if each.configured] == [configured]
        assert found[configured].sync == (None if configured == "psdp" else sync)
        period = getattr(sync, "period", DilocoConfig().period)
        assert {each.sync.period for each in found.values() if each.sync} == {period}
        assert found["streaming"].sync.delay == 0 < found["streaming_overlap"].sync.delay
    assert compared(DilocoConfig(), layers=8)["streaming_overlap"].sync == default
    assert compared(DilocoConfig(period=2), layers=1)["streaming_overlap"].sync.fragments == 2


def test_the_table_says_what_each_method_sends(plans):
    report = report_of(plans("tau 2"), 257, 10.0)
    methods = report["methods"]
    assert methods["psdp"]["bytes_per_step"]["peak"] == methods["diloco"]["bytes_per_step"]["peak"]
    assert methods["diloco"]["bytes_per_step"]["average"] == methods["psdp"]["bytes_per_step"]["average"] / 8
    assert methods["streaming_overlap"]["configured"]
    assert methods["streaming_overlap"]["delay"] == 2
    seconds = max(report["roofline"][f"{name}_seconds"] for name in ("compute", "memory"))
    seconds = max(seconds, report["roofline"]["link_seconds"]["inside slice"])
    for each in methods.values():
        average = each["bytes_per_step"]["average"] * 4 * 8 / 1e9 / seconds
        assert each["gbit_per_second"]["average"] == pytest.approx(average), "four devices a replica"
        assert each["bytes_per_step"]["average"] <= each["bytes_per_step"]["peak"]


def test_command_prints_every_program(plans, tmp_path, monkeypatch, capsys):
    path = tmp_path / "step.hlo"
    monkeypatch.setattr("gregale.programs.plan.command.plan_step", lambda *_: plans("diloco"))
    assert main(["plan", QUICKSTART, *SMALL, *CASES["diloco"][0], "--hlo", str(path)]) == 0
    text = capsys.readouterr().out
    for part in ("outer parameters", "of synchronise", "Collectives of warm_up between slices", "diloco (H 5, conf"):
        assert part in text
    assert path.read_text().startswith("HloModule")
    assert {each.name for each in tmp_path.iterdir()} == {"step.hlo", "step.synchronise.hlo", "step.warm_up.hlo"}
