"""A run in stages equals, to the last bit, runs that are stopped and resumed by hand with the same changes."""

import shutil
from pathlib import Path
from threading import main_thread

import pytest

from gregale.checkpoint.store import Checkpoints
from gregale.programs.train.loop import MeshSteps
from gregale.storage.jsonl import read_entries
from gregale.streams import LEFT_AT_EXIT
from tests.programs.tiny import (
    assert_same_state,
    checkpoint_steps,
    compilations,
    content,
    killed,
    lines,
    losses,
    trained,
)
from tests.runs.runs import write_starts

MORE, DILOCO = "{type: text, files: ['text/[0-3].txt'], weight: 3}", "{type: diloco, period: 2}"
YARN = "{rotary_scaling: {type: yarn, factor: 2, original_context: 32}}"
LONGER = f"mesh: {{context: 2, model: 1}}, batch: {{size: 16, sequence_length: 64}}, model: {YARN}"
# A further source, and a schedule that rises from the rate of step 4, which is half the new peak.
RATE = "learning_rate: 0.02, schedule: {type: linear, warmup: 2"
CHANGES = {4: f"data: {{sources: {{more: {MORE}}}}}, optimizer: {{{RATE}}}}}"}
# Then a larger batch of longer rows, which devices share; then another method.
CHANGES |= {7: f"{LONGER}, compute: {{remat: full}}", 10: f"sync: {DILOCO}"}
STOPPED = 128 + 15


def stages(*steps: int) -> str:
    """The changes of some steps, or of all, as the value of `stages` on the command line."""
    return f"[{', '.join(f'{{from: {step}, {CHANGES[step]}}}' for step in steps or CHANGES)}]"


@pytest.fixture
def train(gregale, monkeypatch):
    """Trains a run; `stop`: the step after which a signal stops it."""

    def run(name: str, *arguments: str, stop: int | None = None) -> int:
        monkeypatch.setattr(MeshSteps, "is_stopped", lambda steps: steps.step == stop)
        return gregale("train", "tiny.yaml", "--name", name, *arguments)

    return run


@pytest.fixture(scope="module")
def undisturbed(inputs) -> tuple[Path, list[tuple[str, str]]]:
    """The undisturbed run in stages, and the programs that it has compiled, with the names of their threads."""
    with compilations() as compiled:
        return trained(inputs, "tiny.yaml", "staged", "--stages", stages()), compiled


@pytest.fixture
def staged(undisturbed) -> Path:
    return undisturbed[0]


def test_it_equals_resuming_by_hand(train, staged, inputs):
    """Only a stage can change the length of rows: it is added when the run is there."""
    first = ["--data.sources.more", MORE, "--optimizer", f"{{{RATE}, begin: 4, initial: 0.5}}}}"]
    by_hand = {4: first, 7: ["--stages", stages(7)], 10: ["--sync", f"{DILOCO[:-1]}, begin: 10}}"]}
    arguments: list[str] = []
    for step, changes in by_hand.items():
        assert train("hand", *arguments, stop=step) == STOPPED
        arguments += changes
    assert train("hand", *arguments) == 0
    hand = inputs / "runs" / "hand"
    assert losses(staged) == losses(hand)
    assert checkpoint_steps(staged) == checkpoint_steps(hand) == [8, 10, 12]
    for step in (8, 10, 12):
        assert_same_state(staged, hand, step)
    noted = [read_entries(run / "changes.jsonl").entries for run in (staged, hand)]
    assert [line["changes"] for line in noted[0]] == [line["changes"] for line in noted[1]]
    with Checkpoints(staged / "checkpoints") as checkpoints:
        metadata = checkpoints.metadata(12)
    assert (metadata["method"], metadata["examples"]) == ("diloco", 8 * 7 + 16 * 5)
    both = {"words": 1.0, "more": 3.0}
    assert metadata["mixtures"] == [[0, {"words": 1.0}, 32, []], [32, both, 32, []], [56, both, 64, []]]
    tokens = [line["tokens"] for line in lines(staged) if "loss" in line]
    assert tokens == [256 * step for step in range(1, 8)] + [256 * 7 + 1024 * step for step in range(1, 6)]


def test_no_stage_waits_for_its_programs(undisturbed):
    """A thread compiles the steps of each stage but the first, and the averages and evaluation of the last, DiLoCo."""
    _, compiled = undisturbed
    steps = [thread for name, thread in compiled if name == "jit(counted_step)"]
    assert steps[-3:] == [LEFT_AT_EXIT] * 3
    assert steps[:-3] in ([], [main_thread().name]), "another test may have compiled the first"
    for program in ("_after", "eval_model", "sums"):
        assert [thread for name, thread in compiled if name == f"jit({program})"] == [LEFT_AT_EXIT]


def test_stopped_around_boundaries_it_goes_on_bit_for_bit(train, staged, inputs, capsys):
    for step in (3, 4, 5, 10, 11):
        assert train("stopped", "--stages", stages(), stop=step) == STOPPED
    assert train("stopped", "--stages", stages()) == 0
    out = capsys.readouterr().out
    assert out.count("Going on after step 4 of 12, in stage 2 of 4.") == 1
    assert "Stage 3 of 4 begins after step 7: mesh.context 1 -> 2; mesh.model 2 -> 1;" in out
    assert losses(inputs / "runs" / "stopped") == losses(staged)
    assert_same_state(inputs / "runs" / "stopped", staged, 12)


def test_killed_after_a_boundary_it_takes_it_again(train, staged, inputs):
    """As `kill -9` leaves it: the newest checkpoint is of a stage before, and the lines of later steps are there."""
    run = killed(staged, inputs / "runs" / "killed", 8)
    assert train("killed", "--stages", stages()) == 0
    assert losses(run) == losses(staged)
    assert_same_state(run, staged, 12)


def test_a_branch_equals_the_run_that_goes_on(train, staged, inputs, refused):
    """Its optimizer's state, data and step are those of the other run, which stays as it is."""
    trunk, branch = inputs / "runs" / "trunk", ["--start_from", "trunk", "--stage", "3", "--stages"]
    assert train("trunk", "--stages", stages(), stop=7) == STOPPED
    before = content(trunk)
    assert train("branch", *branch, stages()) == 0
    assert losses(inputs / "runs" / "branch") == losses(staged)[7:]
    tokens = [[line["tokens"] for line in lines(run) if "tokens" in line] for run in (inputs / "runs/branch", staged)]
    assert tokens[0] == tokens[1][7:]
    for step in (8, 10, 12):
        assert_same_state(inputs / "runs" / "branch", staged, step)

    other = f"{stages(4)[:-1]}, {{from: 7, data: {{sources: {{words: {{weight: 9}}}}}}}}]"
    assert train("other branch", *branch, other, stop=9) == STOPPED, "another mixture"
    assert train("other branch", *branch, other) == 0, "the same command resumes it"
    assert [step for step, _ in losses(inputs / "runs" / "other branch")] == [8, 9, 10, 11, 12]
    assert content(trunk) == before

    command = ["train", "tiny.yaml", "--name", "never", "--stages", stages(), "--start_from", "trunk", "--stage"]
    assert "--stage is 5, but the configuration has 4 stage(s); 2 to 4 would work" in refused(*command, "5")
    assert "stage 4 begins after step 10, but runs/trunk has checkpoints of the steps 4, 7." in refused(*command, "4")
    assert "cannot go on with the stages before stage 3: seed 0 -> 1" in refused(*command, "3", "--seed", "1")
    assert "start_from is not given" in refused(*command, "3", "--start_from", "null")
    assert "staged is a run that did not begin after step 7" in refused(*command, "3", "--name", "staged")
    assert "trunk is this run itself" in refused(*command, "3", "--name", "trunk", "--fresh")
    assert not (inputs / "runs" / "never").exists()
    write_starts(inputs / "runs" / "branch", {"branch": {}, "stage": 3})
    shutil.rmtree(inputs / "runs" / "branch" / "checkpoints")
    (inputs / "runs" / "branch" / "newest_checkpoint.json").unlink()
    assert "began at stage 3 and has no checkpoint yet" in refused(*command[:-1], "--name", "branch")


def test_later_stages_may_change_and_what_was_used_may_not(train, staged, refused, evaluated):
    """A source of a stage that has not begun may be added; the text of a source that was used is needed."""
    assert evaluated(staged)["step"] == 12, "by the method of its stage"
    assert train("other", "--stages", stages(), stop=5) == STOPPED
    again = ["train", "tiny.yaml", "--name", "other", "--stages"]
    later = "{from: 9, data: {sources: {late: {type: text, files: ['text/7.txt']}}}}"
    assert "data.sources: more is missing, on which this run was trained" in refused(*again, f"[{later}]")
    first = stages(4)[1:-1]
    assert train("other", "--stages", f"[{first}, {later}]", stop=9) == STOPPED
    assert "data: the text is not the one" in refused(*again, f"[{first.replace('[0-3]', '[0-2]')}]")
    begun = f"[{first}, {{from: 5, batch: {{sequence_length: 64}}}}]"
    assert "batch.sequence_length 32 -> 64" in refused(*again, begun)


def test_a_stage_that_does_not_fit_is_refused_before_the_run_begins(refused, inputs):
    """Its mesh; and rows of another length, for which the only document would hold out another end."""
    train = ["train", "tiny.yaml", "--name", "never", "--data.sources.words.files", "text/0.txt", "--stages"]
    assert "stages.0: mesh: " in refused(*train, "[{from: 4, mesh: {data: 3}}]")
    line = refused(*train, "[{from: 4, batch: {sequence_length: 16}}]")
    assert "stages.0: batch.sequence_length: data.sources.words has few documents" in line
    assert not (inputs / "runs" / "never").exists()
