"""Stages of a configuration: the whole configuration of each, and what none of them can change."""

from dataclasses import replace
from typing import Any

import pytest

from gregale.errors import UserError
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load

RUN: dict[str, Any] = {
    "name": "run",
    "steps": 100,
    "data": {"sources": {"web": {"type": "text", "files": ["a"]}, "math": {"type": "text", "files": ["b"]}}},
}


def of(*stages: dict[str, Any], **changes: Any) -> TrainConfig:
    return load(TrainConfig, {**RUN, **changes, "stages": list(stages)})


def test_a_stage_has_the_configuration_before_it_with_its_changes():
    config = of(
        {"from": 0.2, "data": {"sources": {"math": {"weight": 3}, "code": {"type": "text", "files": ["c"]}}}},
        {"from": 50, "batch": {"size": 16}, "sync": {"type": "diloco", "period": 7}},
        {"from": 51, "sync": {"period": 5}, "optimizer": {"learning_rate": "1e-4"}},
    )
    first, second, third, fourth = config.each_stage
    assert [stage.first for stage in config.each_stage] == [0, 20, 50, 51]
    assert first.config == load(TrainConfig, RUN)
    assert second.config.data.weights == {"web": 1, "math": 3, "code": 1}
    assert second.config.data.sources["math"].files == ("b",)
    assert third.config.data == second.config.data
    assert (third.config.batch.size, third.config.batch.sequence_length) == (16, 1024)
    assert (fourth.config.sync.period, fourth.config.optimizer.learning_rate) == (5, 1e-4)
    assert [config.after(step).batch.size for step in (19, 49, 50, 200)] == [64, 64, 16, 16]
    assert [config.at(step).batch.size for step in (0, 50, 51)] == [64, 64, 16], "of a checkpoint"


def test_outer_steps_are_those_of_the_stages_with_their_method():
    """`begin` and `end` of the outer steps, which are no part of the method that made a checkpoint."""
    given = {"type": "diloco", "period": 5, "outer": {"schedule": {"type": "linear", "end": 3}}}
    config = of(
        {"from": 30, "batch": {"size": 16}},
        {"from": 50, "sync": {"period": 7}},
        {"from": 70, "sync": {"period": 9, "begin": 60}},
        {"from": 80, "sync": {"type": "psdp"}},
        sync=given,
    )
    stages = [stage.config.sync for stage in config.each_stage[:4]]
    assert [(each.begin, each.end) for each in stages] == [(0, 50), (0, 50), (50, 70), (60, 80)]
    assert stages[0] == stages[1] == config.sync, "a run that gets a stage goes on with its outer optimizer"
    assert [each.outer.schedule.end for each in stages] == [3] * 4
    _, coded = of({"from": 60, "reduce": {"codec": "int8"}}, sync=given).each_stage
    assert coded.config.sync.begin == 60, "the replicas are joined, and begin anew"
    _, late = of({"from": 40, "sync": given}).each_stage
    assert (late.config.sync.begin, late.config.sync.end) == (40, None)


def test_a_schedule_of_a_stage_is_of_its_steps_and_rises_from_the_rate_before():
    linear = {"type": "linear", "final": 0.5}
    config = of(
        {"from": 20, "optimizer": {"learning_rate": 2e-3}},
        {"from": 40, "optimizer": {"learning_rate": 1e-3, "schedule": {"warmup": 10}}},
        {"from": 60, "log_every": 2},
        {"from": 80, "optimizer": {"schedule": {"type": "constant", "warmup": 0.5}}},
        optimizer={"schedule": linear},
    )
    *_, second, third, fourth, fifth = (stage.config.optimizer.schedule for stage in config.each_stage)
    assert (second.begin, second.end) == (0, None)
    assert third == replace(second, warmup=10, begin=40, end=80, initial=third.initial)
    assert third.initial == pytest.approx(2 * (1 - 0.5 * 39 / 100))
    assert fourth == third, "until a stage gives another one"
    assert (fifth.begin, fifth.end, fifth.initial) == (80, None, pytest.approx(1 - 0.5 * 29 / 30))
    given = {"warmup": 3, "begin": 0, "initial": 0.25}
    own = of({"from": 40, "optimizer": {"schedule": given}}).each_stage[1].config.optimizer.schedule
    assert (own.begin, own.end, own.initial) == (0, None, 0.25)
    with pytest.raises(UserError, match=r"optimizer\.schedule\.warmup is 200 = 200 steps"):
        of({"from": 40, "optimizer": {"schedule": {"warmup": 3}}}, optimizer={"schedule": {"warmup": 200}})


RAMP = {0: 16, 0.1: 32, 50: 64}
LONG = [{"from": 0.1, "batch": {"size": 32}}, {"from": 50, "batch": {"size": 64}}]


def test_sizes_by_step_are_stages(tmp_path):
    """Also on the command line, and beside written stages, whose own size counts."""
    assert of(batch={"size": RAMP}) == of(*LONG, batch={"size": 16})
    assert load(TrainConfig, RUN, ["--batch.size", "{0: 16, 0.1: 32, 50: 64}"]) == of(*LONG, batch={"size": 16})
    assert load(TrainConfig, RUN | {"batch": {"size": RAMP}}, ["--batch.size=7"]).each_stage[-1].first == 0
    written = [{"from": 10, "log_every": 3}, {"from": 30, "log_every": 4}, {"from": 0.5, "batch": {"size": 5}}]
    stages = of(*written, batch={"size": RAMP}).each_stage
    found = [(stage.first, stage.config.batch.size, stage.config.log_every) for stage in stages]
    assert found == [(0, 16, 1), (10, 32, 3), (30, 32, 4), (50, 5, 4)]


WRONG_SIZES = {  # by the line of the sizes and what follows
    "{1: 2}}": r"batch\.size has no size for step 0 \(.*run\.yaml, line 3\); sizes by step",
    "{0: 2, soon: 4}}": "has the key 'soon'",
    "{0: 2, -1: 4}}": "has the key '-1'",
    "{0: 2, 5: many}}": r"`batch\.size\.5` \(.*\) is 'many', a str; expected int",
    "{0: 2, 0.5: 3, 50: 4}}": r"stages\.1\.from is 50 \(.*line 3\), step 50; it has to be after step 50",
    "{0: 2, 100: 4}}": r"stages\.0\.from is 100 \(.*\), step 100; .* before step 100, the end",
    "{0: 2, 9: 4}}\nstages: [{from: 7},\n {from: 12, seed: 7}]": r"stages\.2 has a change \(.*line 5\) that a run",
}


@pytest.mark.parametrize("sizes", WRONG_SIZES)
def test_wrong_sizes_by_step_are_refused(sizes, tmp_path):
    (tmp_path / "run.yaml").write_text(f"name: a\nsteps: 100\nbatch: {{size: {sizes}\n")
    with pytest.raises(UserError, match=WRONG_SIZES[sizes]) as caught:
        load(TrainConfig, str(tmp_path / "run.yaml"))
    assert "\n" not in str(caught.value)


CODE = {"sources": {"code": {"type": "text", "files": ["c"]}}}
UNUSED = {"sources": {"web": {"weight": 0}, "math": {"weight": 0}}}
NEVER = r"stages\.0 has a change that a run cannot make: "
WHOLE = "is given, but `.*` holds for the whole run"
REFUSED = {  # stage, message, and changes of the run
    "no from": ({"batch": {"size": 2}}, r"stages\.0\.from is missing; a stage begins after a number of steps", {}),
    "at the begin": ({"from": 0}, r"stages\.0\.from is 0, step 0; it has to be after step 0", {}),
    "at the end": ({"from": 100}, r"stages\.0\.from is 100, step 100; .* before step 100, the end of the run", {}),
    "of the run": ({"from": 5, "steps": 7}, rf"stages\.0\.steps {WHOLE}", {}),
    "the seed": ({"from": 5, "seed": 1}, rf"{NEVER}seed 0 -> 1 \(it orders", {}),
    "the shape": (
        {"from": 5, "model": {"layers": 3}},
        rf"{NEVER}model\.layers 12 -> 3 \(the saved parameters have",
        {},
    ),
    "an unknown key": ({"from": 5, "batch": {"sizes": 8}}, r"stages\.0 has an invalid change: `batch\.sizes` is", {}),
    "no source": ({"from": 5, "data": UNUSED}, r"an invalid change: data\.sources has no weight above 0", {}),
    "bpe": (
        {"from": 5, "data": CODE},
        r"another source, but .* bpe",
        {"data": {**RUN["data"], "tokenizer": {"type": "bpe"}}},
    ),
    "of a fleet": ({"from": 5, "sync": {"period": 7}}, rf"stages\.0\.sync {WHOLE}", {"islands": {"lighthouse": "a:1"}}),
}


@pytest.mark.parametrize(("stage", "message", "changes"), REFUSED.values(), ids=REFUSED)
def test_what_no_stage_can_be_is_refused_in_one_line(stage, message, changes):
    with pytest.raises(UserError, match=message) as caught:
        of(stage, **changes)
    assert "\n" not in str(caught.value)


def test_stages_are_in_order_and_know_their_line(tmp_path):
    with pytest.raises(UserError, match=r"stages\.1\.from is 0\.2, step 20; it has to be after step 30"):
        of({"from": 0.3}, {"from": 0.2})
    (tmp_path / "run.yaml").write_text("name: a\nsteps: 9\nstages:\n  - from: 3\n    seed: 7\n")
    with pytest.raises(UserError, match=r"stages\.0 has a change \(.*run\.yaml, line 4\) that a run cannot make"):
        load(TrainConfig, str(tmp_path / "run.yaml"))
