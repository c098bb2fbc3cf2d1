"""`plan --search` on simulated devices: real compiles, of a small model."""

import json
from collections import Counter
from dataclasses import replace
from io import StringIO
from threading import Barrier

import pytest

from gregale.cli import main
from gregale.cost.chips import chip
from gregale.cost.collectives import BETWEEN, INSIDE, Audit
from gregale.errors import UserError
from gregale.model.execution import TO_HOST, execution
from gregale.programs.plan.candidates import (
    Bounds,
    Candidate,
    RankedCandidate,
    candidate_of,
    changes,
    ranked_candidates,
)
from gregale.programs.plan.devices import simulated_target
from gregale.programs.plan.search import (
    ENOUGH,
    MAX_COMPILED,
    Compiler,
    _Known,
    all_candidates,
    at_once,
    remedies,
    search,
)
from gregale.programs.plan.step import MEMORY, plan_step, setup_for
from gregale.programs.plan.text import print_search
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.terminal import Console
from tests.programs.plans import QUICKSTART, SMALL, config_of

CONFIG = config_of("--model.layers=2", "--batch.size=8")
TARGET = simulated_target(CONFIG, None, "v5e")

MESH = ("context", "data", "model")
# Candidates of each mesh that divides 2 key heads and 4 rows: remat x gather x 1, 2 or 3 numbers of microbatches.
MESHES = {(1, 4, 1): 12, (1, 2, 2): 24, (2, 2, 1): 24, (2, 1, 2): 36, (4, 1, 1): 36}


@pytest.fixture(scope="module")
def lines_and_found():
    lines: list[str] = []
    return lines, search(CONFIG, Compiler(257, TARGET, None, None, lines.append))


@pytest.fixture(scope="module")
def found(lines_and_found):
    return lines_and_found[1]


def printed(found) -> str:
    written = StringIO()
    print_search({"name": "small", "chip": "v5e", **found.to_dict()}, Console(file=written, width=110))
    return written.getvalue()


def test_the_fastest_of_those_that_fit_is_chosen(lines_and_found):
    lines, found = lines_and_found
    assert len(found.ranked) == len({each.candidate for each in found.ranked}), "none twice"
    by_mesh = Counter(tuple(each.candidate[f"mesh.{axis}"] for axis in MESH) for each in found.ranked)
    assert by_mesh == MESHES, "remat x microbatches, of which are as many as rows, x gather"
    assert {each.candidate["compute.unroll"] for each in found.ranked} == {1}, "as configured: nothing tells them apart"
    times = [each.bound_seconds for each in found.ranked]
    assert times == sorted(times)
    assert all(each.bound_bytes < each.peak for each in found.ranked if each.peak), "bounds are below"
    assert all(each.bound_seconds <= each.seconds for each in found.ranked if each.seconds)
    mesh = {"mesh.context": 2, "mesh.data": 1, "mesh.model": 2, "compute.remat": "none", "compute.gather": "per_layer"}
    alike = [each for each in found.ranked if mesh.items() <= dict(each.candidate.settings).items()]
    kept = {each.candidate["batch.microbatches"]: each.bound_bytes for each in alike}
    assert kept[1] > kept[2] > kept[4]
    assert kept[1] - kept[2] == pytest.approx(2 * (kept[2] - kept[4]), abs=2), "of what one microbatch keeps"
    compiled = [each for each in found.ranked if each.peak is not None]
    assert ENOUGH <= len(compiled) <= MAX_COMPILED
    assert all(each.fits for each in compiled)
    left = [each.bound_seconds for each in found.ranked if each.peak is None]
    assert found.best.seconds == pytest.approx(min(each.seconds for each in compiled), rel=0.01)
    assert len(compiled) == MAX_COMPILED or max(left) > found.best.bound_seconds
    assert found.configured in {each.candidate for each in compiled}, "to compare with"
    assert found.best.candidate["batch.microbatches"] == 1, "weights are gathered once"
    assert found.remedies == []
    assert lines[0] == f"{len(found.ranked)} candidates by their bounds"
    assert len(lines) == 1 + 2 * len(compiled), "each compile is told before and after"
    assert lines[1] == f"{found.configured}: compiling"
    assert "of 16.00 GiB, fits; a step takes" in lines[2]


def test_what_is_printed_is_a_configuration_and_the_table(found, tmp_path):
    text = printed(found)
    for part in ("microbatches", "tokens/s", "fits *", "132 candidates, ", " of them compiled; "):
        assert part in text
    (tmp_path / "best.yaml").write_text(found.best.candidate.yaml())
    assert text.endswith(found.best.candidate.yaml())
    config = load(TrainConfig, tmp_path / "best.yaml", ["--name=best", "--steps=1", "--mesh.replica=2"])
    best = found.best.candidate.of(CONFIG)
    assert (config.mesh, config.compute.remat) == (best.mesh, best.compute.remat)
    assert config.batch.microbatches == best.batch.microbatches
    own = replace(found, best=replace(found.best, candidate=found.configured))
    assert "The configured settings are the best: " in printed(own)


def test_json_has_it_all(found, monkeypatch, capsys):
    monkeypatch.setattr("gregale.programs.plan.command.search", lambda *_: found)
    assert main(["plan", QUICKSTART, *SMALL, "--search", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["best"] == report["candidates"][[each == found.best for each in found.ranked].index(True)]
    assert report["best"].keys() >= {"settings", "peak", "seconds", "fits", "tokens_per_second"}
    assert report["best"]["settings"].keys() == report["configured"].keys()
    assert report["fits"]


def test_if_nothing_fits_remedies_are_told(found, monkeypatch):
    tight = replace(TARGET, chip=replace(chip("v5e"), memory_bytes=1000))
    for limit in ("MAX_COMPILED", "MAX_MESHES"):
        monkeypatch.setattr(f"gregale.programs.plan.search.{limit}", 1)
    nothing = search(CONFIG, Compiler(257, tight, None, None, str))
    assert [each.candidate for each in nothing.ranked if each.peak is not None] == [nothing.configured]
    assert nothing.best is None
    assert nothing.remedies
    assert not any(each.fits for each in nothing.remedies)
    text = printed(nothing)
    for part in ("Nothing fits.", "The cheapest compiled remedies:", "does not fit; ", "> "):
        assert part in text
    monkeypatch.setattr("gregale.programs.plan.command.search", lambda *_: nothing)
    for options, code in (((), 0), (("--require-fit",), 3)):
        assert main(["plan", QUICKSTART, *SMALL, "--search", *options]) == code


def test_a_remedy_is_what_the_compiler_says_fits():
    """On a chip that another mesh fits; of a kind no more is compiled once a change fits."""
    tight, lines = replace(TARGET, chip=replace(chip("v5e"), memory_bytes=700_000)), []
    compiler = Compiler(257, tight, None, None, lines.append)
    (plan,) = compiler.plans([("as configured", CONFIG)])
    found = remedies(plan, compiler)
    first = found[0]
    assert first.fits
    assert all(each.peak_bytes < compiler.peak(plan) for each in found)
    assert first.peak_bytes <= 700_000
    options = [
        f"--{key}={value}" for key, value in zip(*[iter(first.change.replace("--", "").split())] * 2, strict=True)
    ]
    again = plan_step(config_of("--model.layers=2", "--batch.size=8", *options), 257, tight, MEMORY)
    assert again.memory.peak == first.peak_bytes
    assert len(lines) == len({*lines}), "nothing is compiled twice"


def test_a_pipeline_is_searched_by_its_own_keys():
    """Stages and repeats that divide 4 layers, and microbatches that divide the rows."""
    stages = ["--model.layers=4", "--mesh.stage=2", "--mesh.model=1", "--batch.size=16", "--pipeline.repeats=2"]
    setup = setup_for(config_of(*stages), 257, TARGET)
    left_out = Counter()
    found = all_candidates(setup, 257, TARGET, left_out)
    sizes = {tuple(each.candidate[key] for key in ("mesh.stage", "pipeline.repeats")) for each in found}
    assert sizes == {(2, 1), (2, 2), (4, 1)}
    assert candidate_of(setup) in {each.candidate for each in found}
    assert left_out == {"meshes that do not divide the heads, rows, tokens or layers": 1}, "`model` 4 of 2 key heads"
    assert all(each.candidate["batch.microbatches"] * each.candidate["pipeline.microbatches"] <= 16 for each in found)


def test_no_remedy_moves_values_to_the_host():
    found = changes(setup_for(CONFIG, 257, TARGET), 257, Bounds(257, TARGET))
    policies = {settings.get("compute.remat") for kind in found for settings, _ in kind}
    assert "context" in policies
    assert not policies.intersection(TO_HOST)


def test_idle_stages_are_not_in_the_bound_of_a_pipeline():
    """Of two microbatches in two stages the passes take three times: a third of the stages is idle."""
    target = replace(TARGET, chip=replace(TARGET.chip, link_bytes_per_second=1e20))
    common = ["--mesh.model=1", "--mesh.data=2", "--model.layers=2", "--batch.size=16"]
    stages = ["--mesh.stage=2", "--pipeline.repeats=1", "--pipeline.remat=full", "--pipeline.microbatches=2"]
    plain, staged = (
        Bounds(257, target).of(setup_for(config_of(*common, *each), 257, target)).seconds
        for each in (["--mesh.replica=4", "--compute.remat=full"], stages)
    )
    assert staged == pytest.approx(plain, rel=0.05)


def test_what_is_not_possible_is_left_out_with_its_reason(monkeypatch):
    def refuse(compute, layout, model):
        if compute.remat == "offload":
            raise UserError("compute.remat is offload: not here.")
        return execution(compute, layout, model)

    monkeypatch.setattr("gregale.programs.plan.candidates.execution", refuse)
    left_out = Counter()
    found = ranked_candidates(setup_for(CONFIG, 257, TARGET), Bounds(257, TARGET), left_out)
    assert left_out == {"compute.remat is offload: not here.": 2 * 2}
    assert len(found) == 5 * 2 * 2


def test_what_is_asynchronous_inside_a_slice_is_hidden(found):
    """As far as there is compute; between slices nothing is."""
    (plan,) = Compiler(257, TARGET, None, None, str).plans([("best", found.best.candidate.of(CONFIG))])
    bound = plan.roofline(None)
    assert plan.seconds(None) == pytest.approx(bound.one_after_another), "nothing is, on simulated devices"
    moving = Audit(tuple(replace(each, is_async=True) for each in plan.step.audit.collectives))
    hidden = replace(plan, programs={"step": replace(plan.step, audit=moving)})
    longest = max(bound.compute, bound.memory, bound.links[INSIDE])
    assert hidden.seconds(None) == pytest.approx(longest + bound.links[BETWEEN])


def ranked(mesh: dict[str, int], seconds: float, **more) -> RankedCandidate:
    settings = {"mesh.context": 1, "mesh.model": 1, **{f"mesh.{axis}": size for axis, size in mesh.items()}}
    settings |= {"batch.microbatches": more.pop("microbatches", 1), "compute.remat": more.pop("remat", "full")}
    return RankedCandidate(Candidate(tuple(settings.items())), seconds, more.pop("bytes", 1), **more)


def test_what_a_mesh_adds_is_expected_of_those_that_split_more():
    known = _Known(setup_for(CONFIG, 257, TARGET), Compiler(257, TARGET, None, None, str))
    one, two, four, other = (ranked(mesh, 1.0) for mesh in ({}, {"model": 2}, {"model": 4}, {"context": 2}))
    known.answers = {each.candidate: each for each in (replace(two, seconds=1.5, fits=True, peak=2),)}
    assert [each.candidate for each in known.most_promising([four, other, one])] == [four.candidate]
    known.answers |= {one.candidate: replace(one, seconds=1.2, fits=True, peak=2)}
    assert known.most_promising([four, other])[0].candidate == other.candidate
    known.answers |= {other.candidate: replace(other, seconds=1.1, fits=True, peak=2)}
    assert known.most_promising([four]) == [], "three fit, and it promises no more"
    assert known.most_promising([ranked({}, 0.8, microbatches=2)]) != []


def test_what_may_not_fit_comes_last():
    known = _Known(setup_for(CONFIG, 257, TARGET), Compiler(257, TARGET, None, None, str))
    huge, small = ranked({}, 1.0, bytes=TARGET.memory_bytes + 1), ranked({}, 2.0)
    assert known.most_promising([huge, small]) == [small]
    refused = replace(ranked({}, 1.5, microbatches=2), fits=False, seconds=1.5, peak=1)
    known.answers = {refused.candidate: refused}
    saves_more, recomputes = ranked({}, 1.2, remat="none"), ranked({}, 1.7)
    assert known.most_promising([saves_more, recomputes]) == [recomputes]
    assert known.most_promising([saves_more]) == [saves_more], "nothing is left out, while not enough fit"


def test_of_steps_as_fast_the_configured_one_is_the_best():
    known = _Known(setup_for(CONFIG, 257, TARGET), Compiler(257, TARGET, None, None, str))
    own, other = (
        replace(each, seconds=each.bound_seconds, fits=True) for each in (ranked({}, 1.005), ranked({"model": 2}, 1))
    )
    known.answers = {each.candidate: each for each in (own, other)}
    assert known.best(own.candidate) == own
    known.answers[own.candidate] = replace(own, seconds=1.02)
    assert known.best(own.candidate) == other


def test_several_calls_run_at_once_and_one_that_cannot_be_compiled_ends_no_other():
    both = Barrier(2, timeout=60)
    assert at_once([lambda: both.wait() >= 0, lambda: both.wait() >= 0, lambda: 3], 2) == [True, True, 3]

    def fail(error: Exception):
        raise error

    first, second = at_once([lambda: 1, lambda: fail(UserError("no devices"))], 2)
    assert (first, str(second)) == (1, "no devices")
    with pytest.raises(RuntimeError, match="ours"):
        at_once([lambda: fail(RuntimeError("ours")), lambda: 1], 1)


def test_what_the_compiler_refuses_is_left_out_with_its_reason():
    refused = Compiler(257, TARGET, None, None, str)
    known, one = _Known(setup_for(CONFIG, 257, TARGET), refused), ranked({}, 1.0)
    object.__setattr__(refused, "plans", lambda given: [UserError("a fault of the compiler") for _ in given])
    known.ask([one])
    assert known.left_out == {"a fault of the compiler": 1}
    assert known.most_promising([one]) == []
