import json
import os
from dataclasses import replace

import jax
import pytest

from gregale.cli import main
from gregale.communication.pipeline import Schedule
from gregale.data.config import DataConfig
from gregale.data.preparation import prepare
from gregale.data.sources.text import TextSource
from gregale.data.tokenizers import SAVED_NAME, BpeConfig, BytesConfig, FileConfig, vocabulary_size
from gregale.distributed.devices import with_flags
from gregale.errors import UserError
from gregale.programs.plan.candidates import Bounds, changes
from gregale.programs.plan.devices import for_accelerators, simulated_target, topology_target
from gregale.programs.plan.report import kernels_of, report_of
from gregale.programs.plan.search import remedies
from tests.programs.plans import (
    QUICKSTART,
    SMALL,
    compiled_bytes,
    compiler_for,
    config_of,
    plan_of,
    tables,
    too_large,
)

JSON_KEYS = {"collectives", "kernels", "bytes_per_step", "memory", "flops_per_step", "devices"}
COLLECTIVE_KEYS = {"kind", "dtype", "bytes", "axes", "loop", "times", "link"}


@pytest.fixture(scope="module")
def planned():
    return plan_of(config_of())


@pytest.fixture(scope="module")
def report(planned):
    return report_of(planned, 257, None)


@pytest.mark.parametrize("cpu_devices", [8, None])
def test_xla_has_the_flags_of_train_where_the_run_has_cpu_devices(monkeypatch, cpu_devices):
    assert len(jax.devices()) == 8, "JAX is started with the flags of the tests, not with these"
    own = "--xla_cpu_enable_fast_math=false"
    monkeypatch.setenv("XLA_FLAGS", own)
    simulated_target(replace(config_of(), cpu_devices=cpu_devices), 8, None)
    assert os.environ["XLA_FLAGS"] == (own if cpu_devices is None else with_flags(own, 8))


def test_a_pipeline_is_shown_with_its_bubble_and_remedies_by_its_keys(monkeypatch):
    stages = ["--model.layers=4", "--mesh.stage=2", "--mesh.model=1", "--batch.size=32", "--pipeline.repeats=2"]
    plan = plan_of(config_of(*stages))
    report = report_of(too_large(plan), 257, None)
    schedule = Schedule(2, 2, 2)
    expected = {"stages": 2, "microbatches": 2, "repeats": 2, "forwarding": 1, "iterations": 5, "bubble": 1 / 5}
    assert report["pipeline"] == {**expected, "picture": schedule.picture()}
    assert not report["fits"]
    kinds = changes(plan.setup, 257, Bounds(257, plan.target))
    keys = {f"pipeline.{key}" for key in ("remat", "repeats", "microbatches", "gather")} | {"batch.microbatches"}
    assert {key for kind in kinds for settings, _ in kind for key in settings if "mesh" not in key} == keys
    columns = [kind for kind in kinds if "pipeline.microbatches" in kind[0][0]]
    monkeypatch.setattr("gregale.programs.plan.search.changes", lambda *_: columns)
    (found,) = remedies(too_large(plan), compiler_for(plan))
    assert (found.change, found.fits) == ("--pipeline.microbatches 4", True)
    text = tables(report)
    assert "20.0% of them idle" in text
    assert schedule.picture() in text


def test_json_has_what_other_tools_rely_on(report):
    assert json.loads(json.dumps(report)) == report
    assert report.keys() >= JSON_KEYS
    assert report["devices"] == 8
    assert all(each.keys() == COLLECTIVE_KEYS for each in report["collectives"])
    assert report["bytes_per_step"].keys() == {"axes", "link"}
    assert {each["link"] for each in report["collectives"]} == {"inside slice", "between slices"}
    assert report["flops_per_step"] == report["flops_per_token"] * report["tokens_per_step"]
    compiled = compiled_bytes(report)
    between = sum(size for axes, size in compiled.items() if "replica" in axes)
    assert report["bytes_per_step"]["link"]["between slices"] == between


def test_rules_and_attention_are_told(planned, report):
    """Those of the devices; simulated in place of accelerators, those of accelerators."""

    def kernels(cpu_devices=8, **compute):
        config = replace(planned.setup.config, cpu_devices=cpu_devices)
        config = replace(config, compute=replace(config.compute, **compute))
        return kernels_of(replace(planned.setup, config=for_accelerators(config, planned.target)))

    assert report["kernels"] == kernels() == {"rules": "cpu", "attention": "blocked"}
    assert kernels(attention="xla") == {**kernels(), "attention": "xla"}
    plain = {**kernels(), "rules": "plain", "attention": "xla"}
    assert kernels(autodiff_rules="plain") == kernels(cpu_devices=None) == plain
    text = tables(report)
    for part in (
        *("Rules of differentiation: cpu; attention: blocked", "It fits:", "Collectives"),
        *("reduce-scatter", "Roofline", "streaming_overlap"),
    ):
        assert part in text


def test_memory_by_tree(planned, report):
    memory, compiler = report["memory"], planned.step.memory
    trees = ("parameters", "optimizer", "counters", "batch")
    assert compiler.arguments == sum(memory[tree] for tree in trees)
    assert memory["outer_parameters"] == memory["outer_optimizer"] == 0
    assert memory["peak"] == compiler.peak
    assert memory["peak_program"] == "step"
    assert memory["gradients"] == memory["parameters"]
    assert memory["activations"] + memory["gradients"] == memory["temporaries"]
    assert report["fits"]
    assert report["remedies"] == []


def test_it_is_the_step_that_train_compiles(planned):
    state, abstract = planned.setup.initial_state(), planned.setup.abstract_state()
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), abstract
    )


def test_every_remedy_takes_less_and_does_what_it_says(planned):
    found = remedies(too_large(planned), compiler_for(planned))
    assert {each.change.split()[0] for each in found} <= {"--batch.microbatches", "--mesh.replica", "--compute.remat"}
    assert all(each.fits and each.peak_bytes < planned.memory.peak and each.step_time > 0 for each in found)
    assert [each.step_time for each in found] == sorted(each.step_time for each in found)
    assert plan_of(config_of(*found[0].change.split())).memory.peak == found[0].peak_bytes, "options that can be pasted"


def test_methods_need_less_of_the_link_the_less_they_send(report):
    needed = {name: each["needed_gbit_per_second"] or float("inf") for name, each in report["methods"].items()}
    assert needed["psdp"] > needed["diloco"] >= needed["streaming"] >= needed["streaming_overlap"]
    for each in report["methods"].values():
        curve = dict(zip(each["curve"]["gbit_per_second"], each["curve"]["utilisation"], strict=True))
        needed = each["needed_gbit_per_second"]
        reached = [gbit for gbit, utilisation in curve.items() if utilisation >= 0.9]
        assert (min(reached) == pytest.approx(needed, rel=1e-3)) if needed else not reached


def test_the_link_can_be_given(planned):
    slow, fast = (report_of(planned, 257, gbit) for gbit in (1.0, 100.0))
    assert slow["roofline"]["link_seconds"]["between slices"] == pytest.approx(
        100 * fast["roofline"]["link_seconds"]["between slices"]
    )
    assert slow["methods"]["psdp"]["utilisation"] < fast["methods"]["psdp"]["utilisation"]


def test_what_does_not_fit_is_told_with_remedies(planned, capsys, monkeypatch):
    """Exit code 3 only if it has to fit."""
    monkeypatch.setattr("gregale.programs.plan.command.plan_step", lambda *_: too_large(planned))
    for options, code in (((), 0), (("--require-fit",), 3)):
        assert main(["plan", QUICKSTART, *SMALL, *options]) == code
    text = capsys.readouterr().out
    assert "It does not fit:" in text
    assert "times the step time: --batch.microbatches" in text


def test_every_stage_is_planned_and_the_largest_is_shown(planned, capsys, monkeypatch):
    memory = replace(planned.memory, reported_peak=planned.memory.peak + 1)
    larger = replace(planned, programs={"step": replace(planned.step, memory=memory)})
    plans = {16: planned, 32: larger}
    monkeypatch.setattr("gregale.programs.plan.command.plan_step", lambda config, *_: plans[config.batch.size])
    assert (
        main(["plan", QUICKSTART, *SMALL, "--stages", "[{from: 3, batch: {size: 32}}, {from: 9, log_every: 5}]"]) == 0
    )
    assert "This is the plan of stage 2." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "4"], "= 8 devices, but there are 4"),
        (["--slices", "2"], "slices is 2, but without a topology"),
        (["--chip", "abacus"], "'abacus' is not in the table"),
        (["--search", "--hlo", "step.txt"], "search and hlo are both given"),
        (["--search", "--stages", "[{from: 3}]"], "stages is given, and a search is of one stage"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, message, refusal):
    assert message in refusal("plan", QUICKSTART, *SMALL, *arguments)


def test_a_missing_compiler_is_told(monkeypatch):
    monkeypatch.setattr("gregale.programs.plan.devices.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"is not installed\. Run `.* '\.\[tpu\]'`"):
        topology_target("v5e:2x2", 1, None)


def test_vocabulary_is_that_of_the_prepared_corpus(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"the north-east wind of the Mediterranean, number {number}; " * 20)
    sources, cache = {"text": TextSource(files=[str(tmp_path / "*.txt")])}, tmp_path / "cache"
    for tokenizer in (BytesConfig(), BpeConfig(vocabulary=280)):
        data = DataConfig(sources=sources, tokenizer=tokenizer, held_out=0.2, cache=str(cache), workers=1)
        assert vocabulary_size(tokenizer) == prepare(data, 8, 0).tokenizer.vocabulary_size
    saved = json.loads(next(cache.glob(f"*/{SAVED_NAME}")).read_text())
    path = tmp_path / "library.json"
    path.write_text(json.dumps(saved["library"]))
    assert vocabulary_size(FileConfig(path=str(path), end_of_document=saved["end_of_document"])) == 280
