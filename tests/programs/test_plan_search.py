"""`plan --search` on simulated devices: real compiles, of a small model."""

import json
from collections import Counter
from dataclasses import replace
from io import StringIO

import pytest

from gregale.cli import main
from gregale.cost.chips import chip
from gregale.cost.collectives import BETWEEN, INSIDE, Audit
from gregale.errors import UserError
from gregale.model.execution import execution
from gregale.programs.plan.candidates import Candidate, ScoredCandidate, candidate_of, scored_candidates
from gregale.programs.plan.devices import simulated_target
from gregale.programs.plan.search import ENOUGH, SearchOptions, _Compiler, all_candidates, search
from gregale.programs.plan.step import MEMORY, plan_step, scheduled_seconds, setup_for
from gregale.programs.plan.text import print_remedies, print_search
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
    return lines, search(CONFIG, 257, TARGET, SearchOptions(None, None, lines.append))


@pytest.fixture(scope="module")
def found(lines_and_found):
    return lines_and_found[1]


@pytest.fixture(scope="module")
def nothing():
    """A search for a chip whose memory no candidate fits."""
    tight = replace(TARGET, chip=replace(chip("v5e"), memory_bytes=1000))
    return search(CONFIG, 257, tight, SearchOptions(None, None, str))


def printed(found) -> str:
    written = StringIO()
    print_search({"name": "small", "chip": "v5e", **found.to_dict()}, Console(file=written, width=110))
    return written.getvalue()


def test_the_fastest_of_those_that_fit_is_chosen(lines_and_found):
    lines, found = lines_and_found
    assert len(found.scored) == len({each.candidate for each in found.scored}), "none twice"
    by_mesh = Counter(tuple(each.candidate[f"mesh.{axis}"] for axis in MESH) for each in found.scored)
    assert by_mesh == MESHES, "remat x microbatches, of which are as many as rows, x gather"
    assert {each.candidate["compute.unroll"] for each in found.scored} == {1}, "as configured: nothing tells them apart"
    times = [each.closed_form_seconds for each in found.scored]
    assert times == sorted(times)
    compiled = [each for each in found.scored if each.peak is not None]
    assert len(compiled) == ENOUGH
    assert all(each.fits for each in compiled)
    assert found.best == min(compiled, key=lambda each: each.seconds)
    assert found.configured in {each.candidate for each in compiled}, "to compare with"
    assert found.best.candidate["batch.microbatches"] == 1, "weights are gathered once"
    assert found.remedies == []
    assert lines[0] == f"{len(found.scored)} candidates by closed forms"
    assert len(lines) == 1 + 2 * ENOUGH, "each compile is told before and after"
    assert lines[1] == f"{found.configured}: compiling"
    assert "of 16.00 GiB, fits; a step takes" in lines[2]


def test_what_is_printed_is_a_configuration_and_the_table(found, tmp_path):
    text = printed(found)
    for part in ("microbatches", "tokens/s", "fits *", "132 candidates, 3 of them compiled", "The best: "):
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
    assert report["best"] == report["candidates"][[each == found.best for each in found.scored].index(True)]
    assert report["best"].keys() >= {"settings", "peak", "seconds", "fits", "tokens_per_second"}
    assert report["best"]["settings"].keys() == report["configured"].keys()
    assert report["fits"]


def test_if_nothing_fits_the_smallest_is_compiled_and_remedies_are_told(nothing, monkeypatch):
    compiled = [each for each in nothing.scored if each.peak is not None]
    assert [each.closed_form_peak for each in compiled] == [min(each.closed_form_peak for each in nothing.scored)]
    assert nothing.best is None
    assert nothing.remedies
    text = printed(nothing)
    assert "Nothing fits." in text
    assert "The cheapest remedies" in text
    assert "too large" in text
    monkeypatch.setattr("gregale.programs.plan.command.search", lambda *_: nothing)
    for options, code in (((), 0), (("--require-fit",), 3)):
        assert main(["plan", QUICKSTART, *SMALL, "--search", *options]) == code


def test_what_is_near_the_memory_is_uncertain_until_it_is_compiled(found):
    """By the range in which the compiler's peak lies."""
    other = replace(next(each for each in found.scored if each.peak is None), compared=True)
    low, high = other.closed_form_range
    assert low < other.closed_form_peak

    def verdict(memory: int) -> str:
        text = printed(replace(found, memory=memory, scored=[other]))
        row = next(line for line in text.splitlines() if "│ ~" in line)
        return row.rstrip("│ ").rpartition("│")[2].strip() or "-"

    assert [verdict(memory) for memory in (low - 1, low, high - 1, high)] == [
        "too large",
        "uncertain",
        "uncertain",
        "-",
    ]
    other = replace(other, compared=False)
    assert verdict(high) == "uncertain", "no step of these sizes was compared"
    remedy = {
        "change": "--key 2",
        "peak_bytes": 100,
        "range": (85, 117),
        "fits": False,
        "compiled": False,
        "step_time": 1,
        "certain": False,
    }
    for memory, changes, text in (
        (84, {}, "does not fit"),
        (90, {}, "uncertain (85 B to 117 B)"),
        (110, {"fits": True}, "uncertain (85 B to 117 B)"),
        (117, {"fits": True, "certain": True}, "fits"),
        (117, {"fits": True}, "uncertain (85 B to 117 B)"),
        (99, {"compiled": True}, "does not fit"),
    ):
        written = StringIO()
        print_remedies([remedy | changes], memory, Console(file=written, width=110))
        by = " (compiled)" if changes.get("compiled") else ""
        assert f"  100 B{by}, {text}; 1.00 times the step time: --key 2\n" in written.getvalue()


def test_remedies_of_a_search_are_compiled():
    """On a chip that another mesh fits; what is estimated to fit and does not is told so."""
    tight = replace(TARGET, chip=replace(chip("v5e"), memory_bytes=700_000))
    plan = plan_step(CONFIG, 257, tight, MEMORY)
    first, *others = _Compiler(plan.setup, 257, tight, SearchOptions(None, None, str)).remedies(plan)
    assert first.change == "--mesh.replica 1 --mesh.data 4"
    assert (first.fits, first.compiled) == (True, True)
    assert first.peak_bytes <= 700_000
    assert not any(each.fits and not each.compiled for each in others)


def test_a_pipeline_is_searched_by_its_own_keys():
    """Stages and repeats that divide 4 layers, and microbatches that divide the rows."""
    stages = ["--model.layers=4", "--mesh.stage=2", "--mesh.model=1", "--batch.size=16", "--pipeline.repeats=2"]
    setup = setup_for(config_of(*stages), 257, TARGET)
    found, left_out = all_candidates(setup, 257, TARGET, None)
    sizes = {tuple(each.candidate[key] for key in ("mesh.stage", "pipeline.repeats")) for each in found}
    assert sizes == {(2, 1), (2, 2), (4, 1)}
    assert candidate_of(setup) in {each.candidate for each in found}
    assert left_out == {"meshes that do not divide the heads, rows, tokens or layers": 1}, "`model` 4 of 2 key heads"
    assert all(each.candidate["batch.microbatches"] * each.candidate["pipeline.microbatches"] <= 16 for each in found)


def test_what_is_not_possible_is_left_out_with_its_reason(monkeypatch):
    def refuse(compute, layout, model):
        if compute.remat == "offload":
            raise UserError("compute.remat is offload: not here.")
        return execution(compute, layout, model)

    monkeypatch.setattr("gregale.programs.plan.candidates.execution", refuse)
    left_out = Counter()
    weighed = scored_candidates(setup_for(CONFIG, 257, TARGET), TARGET, None, left_out)
    assert left_out == {"compute.remat is offload: not here.": 2 * 2}
    assert len(weighed) == 5 * 2 * 2


def test_what_is_asynchronous_inside_a_slice_is_hidden(found):
    """As far as there is compute; between slices nothing is."""
    plan = plan_step(found.best.candidate.of(CONFIG), 257, TARGET, MEMORY)
    bound = plan.roofline(None)
    assert scheduled_seconds(plan, None) == pytest.approx(bound.one_after_another), "nothing is, on simulated devices"
    moving = Audit(tuple(replace(each, is_async=True) for each in plan.step.audit.collectives))
    hidden = replace(plan, programs={"step": replace(plan.step, audit=moving)})
    longest = max(bound.compute, bound.memory, bound.links[INSIDE])
    assert scheduled_seconds(hidden, None) == pytest.approx(longest + bound.links[BETWEEN])


def test_one_that_takes_more_than_what_does_not_fit_is_not_asked_about():
    compiler = _Compiler(setup_for(CONFIG, 257, TARGET), 257, TARGET, SearchOptions(None, None, str))

    def weighed(microbatches: int, seconds: float, remat="full", fits: bool | None = None) -> ScoredCandidate:
        candidate = Candidate((("compute.remat", remat), ("batch.microbatches", microbatches)))
        return ScoredCandidate(candidate, 1, seconds, (1, 1), False, fits=fits, seconds=seconds)

    two = weighed(2, 2.0, fits=False)
    compiler.answers[two.candidate] = two
    assert not compiler.is_worth(two)
    assert not compiler.is_worth(weighed(1, 1.0))
    assert compiler.is_worth(weighed(4, 3.0))
    assert compiler.is_worth(weighed(1, 1.0, "context"))
    compiler.answers[two.candidate] = replace(two, fits=True)
    assert not compiler.is_worth(weighed(4, 3.0)), "slower than what fits"
    assert compiler.is_worth(weighed(1, 1.0))
