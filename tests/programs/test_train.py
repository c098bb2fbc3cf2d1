"""Training through the command line: what a run leaves, and how it goes on."""

import json
import shutil

import numpy as np
import pytest

from gregale import __version__ as gregale_version
from gregale.checkpoint.files import arrays_by_name
from gregale.checkpoint.store import Checkpoints
from gregale.data.examples import Examples
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.trained_model import checkpoint_template
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.programs.tiny import (
    CONFIG,
    again,
    assert_same_state,
    checkpoint_steps,
    content,
    damage,
    lines,
    losses,
    saved_state,
)
from tests.runs.runs import seal

STEPS = CONFIG["steps"]


@pytest.fixture
def half(copied):
    """What a kill after the checkpoint of step 8 leaves of that run: later lines, a torn one, no later checkpoint."""
    shutil.rmtree(copied / "checkpoints" / "step-00000012")
    kept = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)[:11]
    (copied / "metrics.jsonl").write_text("".join(kept) + kept[0][:20])
    return copied


def test_a_run_leaves_what_is_documented(whole):
    names = {path.name for path in whole.iterdir()}
    files = {"config.yaml", "metrics.jsonl", "newest_checkpoint.json", "starts.jsonl", "tokenizer.json"}
    assert names == {*files, "checkpoints"}
    assert checkpoint_steps(whole) == [4, 8, 12]
    steps = [line for line in lines(whole) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    documented = ("step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds")
    spent = ("elapsed_seconds", "data_seconds", "evaluation_seconds", "saving_seconds")
    assert {tuple(line) for line in steps} == {(*documented, *spent, "host_memory_bytes", "replica_bytes")}
    assert [line["tokens"] for line in steps] == [8 * 32 * step for step in range(1, STEPS + 1)]
    evaluations = [line for line in lines(whole) if "loss" not in line]
    assert [tuple(line) for line in evaluations] == [("step", "eval_loss", "bits_per_byte")] * 2
    assert [line["step"] for line in evaluations] == [6, 12]

    (start,) = map(json.loads, (whole / "starts.jsonl").read_text().splitlines())
    facts = {"step": 0, "devices": 8, "device_kind": "cpu", "kernels": {"rules": "cpu", "attention": "blocked"}}
    assert start.items() >= {**facts, "compiler_options": {}}.items()
    assert start["mesh"] == {"island": 1, "replica": 2, "stage": 1, "context": 1, "data": 2, "model": 2}
    for line in (whole / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def on_mesh(replica: int, data: int, model: int, context: int = 1) -> list[str]:
    sizes = ["--mesh.replica", replica, "--mesh.data", data, "--mesh.model", model, "--mesh.context", context]
    return [*map(str, sizes), "--batch.microbatches", "1"]


def test_a_state_is_restored_on_another_mesh_bit_for_bit(whole, inputs):
    """Parameters, the optimizer's state and the counters, each array in the shards of the new mesh."""
    setup = set_up(load(TrainConfig, inputs / "tiny.yaml", on_mesh(1, 4, 2)), tokens=257)
    with Checkpoints(whole / "checkpoints") as checkpoints:
        tree = checkpoints.restore(8, lambda metadata: checkpoint_template(setup, metadata)).tree
    found, expected = arrays_by_name(tree), saved_state(whole, 8)
    assert found.keys() == expected.keys()
    assert all(any(part in name for name in found) for part in ("parameters", "sharded", "step"))
    wanted = arrays_by_name(setup.abstract_state())
    for name, array in found.items():
        assert array.sharding == wanted[name].sharding, name
        assert array.sharding.mesh.shape == setup.layout.mesh.shape, name
        assert array.dtype == expected[name].dtype, name
        assert np.asarray(array).tobytes() == expected[name].tobytes(), name


def test_another_mesh_goes_on_with_the_same_rows(printed, half, whole):
    out = printed(*again(half), *on_mesh(4, 1, 1, context=2))
    assert "(replica 4 x context 2)" in out
    assert "The newest checkpoint, of step 12, is gone: going on from that of step 8 repeats 4 steps." in out
    assert losses(half)[:8] == losses(whole)[:8]
    np.testing.assert_allclose(losses(half), losses(whole), rtol=0, atol=1e-5)
    sent = [line["replica_bytes"] for line in lines(half) if "loss" in line]
    before = [line["replica_bytes"] for line in lines(whole) if "loss" in line][:8]
    each = set_up(load(TrainConfig, half / "config.yaml"), tokens=257).method.bytes_sent(1)
    assert sent == before + [before[-1] + each * step for step in range(1, STEPS - 7)], "of both meshes"


def test_a_checkpoint_of_another_version_is_an_error(refusal, half):
    folder = half / "checkpoints" / "step-00000008"
    (path,) = folder.glob("*/metadata.json")
    metadata = json.loads(path.read_text())
    del metadata["examples"]
    path.write_text(json.dumps(metadata))
    seal(folder)
    message = f"The checkpoint's metadata.json lacks `examples` (it has: {', '.join(metadata)})"
    assert message in refusal(*again(half))


def test_what_may_change_does_not_keep_a_run_from_going_on(gregale, half):
    """A process killed between an evaluation and the next checkpoint has written samples that come again, once."""
    sampled = ["--samples.prompts", "[the, '']", "--samples.tokens", "5", "--evaluation.every", "2"]
    longer = ["--steps", "14", "--checkpoint.every", "7", "--evaluation.batches", "1", "--log_every", "2"]
    options = ["--compute.compiler_options", "{xla_cpu_enable_fast_min_max: false, xla_tpu_nonsense: 1}"]
    (half / "samples.txt").write_text("--- step 8\nthe old\n--- step 10\nthe same\n--- step 11\nthe tor")
    assert gregale(*again(half), *longer, *options, *sampled) == 0
    assert [step for step, _ in losses(half)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14]
    assert checkpoint_steps(half) == [4, 8, 14]
    last = json.loads((half / "starts.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["compiler_options"]) == (8, {"xla_cpu_enable_fast_min_max": False})
    first, *entries = (half / "samples.txt").read_text().split("--- step ")
    assert first == ""
    assert entries[0] == "8\nthe old\n"
    assert [entry.split("\n")[0] for entry in entries] == ["8", "10", "10", "12", "12", "14", "14"]
    assert "the same" not in entries[1]


def test_a_damaged_checkpoint_and_damaged_figures_are_reported_and_end_no_run(printed, half, whole, tmp_path):
    complete = shutil.copytree(whole, tmp_path / "whole")
    damage(half, 8, "corrupted")
    for run in (complete, half):
        others = (run / "metrics.jsonl").read_bytes().partition(b"\n")[2]
        (run / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": \xff\xfe\n' + others)
        text = printed(*again(run))
        assert text.count("lines are damaged, the first is line 1; they are left out.") == 1
        assert ("whole is complete" in text) == (run == complete)
    out = text.splitlines()
    reports = [line for line in out if "is damaged" in line]
    assert len(reports) == 1, out
    assert "The checkpoint of step 8 is damaged" in reports[0]
    assert "step 4 is used instead" in reports[0]
    rate = next(line["learning_rate"] for line in lines(whole) if line["step"] == 5 and "learning_rate" in line)
    assert f"Going on after step 4 of 12. The next step has a learning rate of {rate:.3g}." in out
    assert_same_state(half, whole, STEPS)
    assert losses(half) == losses(whole)[1:]
    assert checkpoint_steps(half) == [4, 8, 12], "the damaged one was saved anew"


def test_a_complete_run_is_left_alone(printed, whole):
    before = content(whole)
    assert "whole is complete: it has done 12 steps" in printed(*again(whole))
    assert "whole is complete: it has done 12 steps, and `steps` is 8." in printed(*again(whole), "--steps", "8")
    assert content(whole) == before


def logged(run, key: str) -> list[float]:
    return [line[key] for line in lines(run) if "loss" in line]


def test_another_learning_rate_and_batch_size_go_on_with_the_next_examples(gregale, printed, half, whole, monkeypatch):
    """Each step's rows are noted as the loop asks for them: none is seen twice, none is left out."""
    seen, batch = [], Examples.batch

    def noted(self, first, batch_size, rows):
        if self.endless:
            seen.append((first, batch_size))
        return batch(self, first, batch_size, rows)

    monkeypatch.setattr(Examples, "batch", noted)
    changes = ["--optimizer.learning_rate", "0.005", "--batch.size", "16", "--optimizer.clip_norm", "null"]
    out = printed(*again(half), *changes)
    assert "Changed since step 8: runs runs -> " in out
    assert "; batch.size 8 -> 16; optimizer.learning_rate 0.01 -> 0.005; optimizer.clip_" in out
    assert sorted(seen)[:4] == [(64, 16), (80, 16), (96, 16), (112, 16)]
    assert logged(half, "tokens") == [32 * 8 * step for step in range(1, 9)] + [32 * (64 + 16 * n) for n in range(1, 5)]
    before = logged(whole, "learning_rate")
    np.testing.assert_allclose(logged(half, "learning_rate"), before[:8] + [rate / 2 for rate in before[8:]])
    (line,) = [json.loads(line) for line in (half / "changes.jsonl").read_text().splitlines()]
    assert line["step"] == 8
    assert line["gregale"] == gregale_version
    assert line["changes"] == {
        "runs": ["runs", str(half.parent)],
        "batch.size": [8, 16],
        "optimizer.learning_rate": [0.01, 0.005],
        "optimizer.clip_norm": [1.0, None],
    }
    (metadata,) = (half / "checkpoints" / "step-00000012").glob("*/metadata.json")
    assert json.loads(metadata.read_text())["examples"] == 128
    # What is in config.yaml now is no change any more.
    shutil.rmtree(half / "checkpoints" / "step-00000012")
    assert gregale(*again(half), *changes, "--log_every", "2") == 0
    entries = (half / "changes.jsonl").read_text().splitlines()
    assert [json.loads(entry)["changes"] for entry in entries[1:]] == [{"log_every": [1, 2]}]
    assert logged(half, "tokens")[-1] == 32 * 128


def test_fresh_sets_the_old_run_aside(gregale, half, capsys):
    old = content(half)
    assert gregale(*again(half), "--fresh", "--seed", "1", "--steps", "5") == 0
    aside = half.with_name(f"{half.name}.old-1")
    assert f"The old run is now {aside}." in capsys.readouterr().out
    assert content(aside) == old
    assert [step for step, _ in losses(half)] == list(range(1, 6))
    assert losses(half)[0] != losses(aside)[0], "another seed, other weights"


def test_other_text_under_the_same_name_is_refused(refused, half, inputs):
    extra = inputs / "text" / "9.txt"
    extra.write_text("one more text " * 50)
    try:
        assert "the text is not the one that this run was trained on until step 8" in refused(*again(half))
    finally:
        extra.unlink()


def test_steps_that_are_not_finite_are_skipped_and_the_run_ends_or_is_not_done(refusal, inputs):
    # Weights of 1e30 overflow in a gradient's norm: no step is ever finite.
    # With the plain rules the first gradient is 0 * inf; those of CPU devices make it 0.
    overflow = ["--model.init_scale=1e30", "--compute.autodiff_rules=plain"]
    error = refusal("train", "tiny.yaml", "--name", "infinite", *overflow, "--max_skipped=3")
    assert "max_skipped: loss or gradient was not finite in the last 3 steps (step 3: loss" in error
    assert "optimizer.learning_rate" in error
    found = lines(inputs / "runs" / "infinite")
    assert [(line["step"], line["grad_norm"], line["skipped"]) for line in found] == [(1, None, 1), (2, None, 2)]
    rates = [line["learning_rate"] for line in found]
    assert rates == pytest.approx([0.0025, 0.0025]), "no update was made, the schedule waits"
    patient = ["--max_skipped=13", "--checkpoint.every=50"]
    error = refusal("train", "tiny.yaml", "--name", "skipped", *overflow, *patient)
    assert "All 12 steps were skipped: in none of them were loss and gradient finite." in error
    assert checkpoint_steps(inputs / "runs" / "skipped") == []
