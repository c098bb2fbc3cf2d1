"""Validation sources, runs that hold out nothing, and `gregale eval` on both and on text that has changed."""

import json

import pytest

from gregale.runs.run_directory import RunDirectory
from tests.programs.tiny import WORDS, killed, lines, trained

VALIDATION = ["--data.validation", "{calm: {type: text, files: [calm.txt]}, noise: {type: text, files: [noise.txt]}}"]


@pytest.fixture(scope="module")
def texts(inputs):
    """Text of its own for the runs, which the tests may change."""
    (inputs / "own").mkdir()
    for path in (inputs / "text").glob("*.txt"):
        (inputs / "own" / path.name).write_text(path.read_text())
    (inputs / "calm.txt").write_text(" ".join(WORDS * 20), encoding="utf-8-sig")
    (inputs / "noise.txt").write_text("".join(chr(33 + number * 7 % 90) for number in range(500)))
    return inputs


def trained_on_own(folder, name, *arguments):
    """The run directory of a run, whose steps are those of `whole`."""
    return trained(folder, "tiny.yaml", name, "--data.sources.words.files", "[own/*.txt]", *arguments)


@pytest.fixture(scope="module")
def validated(texts):
    """A run with held-out text and validation sources, all with tags, that evaluates on one batch of each."""
    noise = "noise: {type: text, files: [noise.txt], tags: [symbols, odd]}"
    tagged = ["--data.validation", f"{{calm: {{type: text, files: [calm.txt], tags: [prose]}}, {noise}}}"]
    tagged += ["--data.sources.words.tags", "[prose]"]
    return trained_on_own(texts, "validated", *tagged, "--evaluation.batches", "1")


def test_each_text_is_reported_apart_and_eval_says_the_same(printed, validated, evaluated, refused):
    (evaluation,) = [line for line in lines(validated) if "eval_loss" in line]
    texts = ("", ".calm", ".noise", "_tag.odd", "_tag.prose", "_tag.symbols")
    pairs = [f"{figure}{name}" for name in texts for figure in ("eval_loss", "bits_per_byte")]
    assert list(evaluation) == ["step", *pairs, "eval_loss_macro", "eval_loss_micro"]
    assert evaluation["eval_loss.noise"] > evaluation["eval_loss.calm"]
    assert evaluated("validated") == evaluation, "also of as many batches as the run's own"
    everything = evaluated("validated", "--all")
    assert everything["eval_loss"] != evaluation["eval_loss"]
    assert evaluated("validated", "--batches", "1000") == everything
    assert "leave one out" in refused("eval", "validated", "--all", "--batches", "3")
    line = printed("eval", "validated").splitlines()[-1]
    assert f"held-out loss {evaluation['eval_loss']:.4f} nats" in line
    assert f"; noise: {evaluation['eval_loss.noise']:.4f} nats a token, " in line


def test_losses_by_tag_are_over_the_tokens_of_all_text_with_it(texts, validated, evaluated):
    found = evaluated("validated", "--all")
    assert found["eval_loss_tag.symbols"] == found["eval_loss_tag.odd"] == found["eval_loss.noise"]
    assert found["bits_per_byte_tag.odd"] == found["bits_per_byte.noise"]
    prose, macro, micro = (found[f"eval_loss_{name}"] for name in ("tag.prose", "macro", "micro"))
    assert macro == pytest.approx((prose + 2 * found["eval_loss.noise"]) / 3)
    tokens = {name: len((texts / f"{name}.txt").read_text("utf-8-sig")) // 32 * 32 for name in ("calm", "noise")}
    of_prose = tokens["noise"] * (found["eval_loss.noise"] - micro) / (micro - prose)
    words = found["eval_loss"] * (of_prose - tokens["calm"])
    assert prose * of_prose == pytest.approx(found["eval_loss.calm"] * tokens["calm"] + words, rel=1e-3)


def test_with_json_everything_else_goes_to_standard_error(gregale, validated, evaluated, capsys, tmp_path):
    """Also the progress of text that has to be encoded first."""
    new = tmp_path / "new.txt"
    new.write_text("the wind and the sea " * 50)
    assert gregale("eval", "validated", "--data", new, "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert list(found) == ["step", "eval_loss", "bits_per_byte"]
    assert "data 1.1 kB/1.1 kB" in captured.err
    assert evaluated("validated", "--data", new, "--all") == found, "all of it anyway"


def test_text_that_has_changed_is_refused(validated, texts, evaluated, refused):
    for path, key in ((texts / "own" / "3.txt", "data.sources"), (texts / "calm.txt", "data.validation.calm")):
        before = path.read_text()
        path.write_text(before + " sea")
        error = refused("eval", "validated")
        assert f"{key}: the text is not what it was when runs/validated saved step 12" in error
        assert "gregale eval runs/validated --data 'FILES'" in error
        assert evaluated("validated", "--data", "noise.txt")["step"] == 12
        path.write_text(before)
    evaluated("validated")


def test_a_run_takes_other_validation_sources_when_it_goes_on(validated, texts, evaluated):
    run = killed(validated, texts / "runs" / "other", 8)
    trained_on_own(texts, "other", "--data.validation", "{news: {type: text, files: [noise.txt]}}")
    assert "eval_loss.news" in lines(run)[-1]
    assert "eval_loss.calm" not in lines(run)[-1]
    assert list(RunDirectory(run).read_config().data.validation) == ["news"]
    assert "eval_loss.news" in evaluated("other", "--step", "8"), "step 8 knows nothing of it"


def test_where_nothing_is_held_out_the_figures_are_over_all_validation_tokens(texts, evaluated, capsys):
    run = trained_on_own(texts, "unheld", "--data.held_out", "0", *VALIDATION, "--evaluation.bigram", "true")
    said = capsys.readouterr().out
    sizes = [len((texts / f"{name}.txt").read_text(encoding="utf-8-sig")) for name in ("calm", "noise")]
    assert f"; nothing held out, {sizes[0] + 1:,} tokens of calm to evaluate on, 501 tokens of noise to" in said
    found = lines(run)[-1]
    summary = said.splitlines()[-2]
    assert f"Done. Validation loss {found['eval_loss']:.4f} nats a token, " in summary
    assert "a bigram model counted on the same training text" in summary
    calm, noise = (found[f"eval_loss.{name}"] for name in ("calm", "noise"))
    counts = [size // 32 * 32 for size in sizes]
    mean = (calm * counts[0] + noise * counts[1]) / sum(counts)
    assert found["eval_loss"] == pytest.approx(mean, rel=1e-4)
    assert evaluated("unheld") == found


def test_training_works_without_any_evaluation(texts, evaluated, refused, capsys):
    arguments = ["--data.held_out", "0", "--samples.prompts", "[the]", "--samples.tokens", "2"]
    run = trained_on_own(texts, "blind", *arguments)
    expected = "Done. Nothing was evaluated: data.held_out is 0 and there is no data.validation."
    assert capsys.readouterr().out.splitlines()[-2] == expected
    assert [line for line in lines(run) if "eval_loss" in line] == []
    assert (run / "samples.txt").read_text().startswith("--- step 12\nthe")
    before = (run / "samples.txt").read_bytes()
    trained_on_own(texts, "blind", *arguments)
    assert "blind is complete" in capsys.readouterr().out
    assert (run / "samples.txt").read_bytes() == before
    assert "runs/blind has no text to evaluate on: its data.held_out is 0" in refused("eval", "blind")
    assert evaluated("blind", "--data", "noise.txt")["step"] == 12
