"""Tasks by `gregale eval` and within a run, beside transformers asked a text at a time."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gregale.checkpoint.manifest import folder_name
from gregale.cli import main
from gregale.data.tokenizers import BytesTokenizer, load_tokenizer
from gregale.evaluation.tasks import encoded, read_tasks
from gregale.programs.runtime.evaluation import Scorer, SlidingEvaluation, halves
from gregale.programs.runtime.trained_model import open_trained
from tests.evaluation.tasks.test_windows import stream_of
from tests.huggingface.hub import CONTEXT, made
from tests.programs.tiny import WORDS, lines, trained

END = BytesTokenizer.end_of_document
LONG = "the north wind and the sea " * 9  # four windows
TIE = {"context": "the sea", "choices": [" wind", " gale", " gale"], "answer": 2}


def question(number: int) -> dict[str, Any]:
    source = np.random.default_rng(number)
    choices = [" ".join(source.choice(WORDS, size)) for size in (1, 2, 1, 3)]
    return {"context": " ".join(source.choice(WORDS, 5)), "choices": choices, "answer": int(source.integers(4))}


FILES: dict[str, list[dict[str, Any]]] = {
    "choice": [
        {"kind": "multiple_choice", "prefix": "wind: sea. "},
        *map(question, range(9)),
        {"context": "na\u00efve \U0001f32c", "choices": ["\u00e9", "\u00e8", "\u00e9\u00e8 \u6d77", "e"], "answer": 1},
        {"context": "a step \n", "choices": ["", "loss"], "answer": 0},
        {"context": LONG, "choices": ["gale", "step by step"], "answer": 0},
        {**TIE, "choices": TIE["choices"][1:], "answer": 1},
    ],
    "bare": [{"kind": "multiple_choice", "delimiter": ""}, {**TIE, "context": ""}, TIE],
    "gap": [
        {"kind": "cloze"},
        {"context": "the _ and the sea", "choices": ["wind", "north wind"], "answer": 0},
        {"context": f"{LONG}_ blew", "choices": ["east", "a"], "answer": 1},
    ],
    "match": [{"kind": "greedy_match"}, *({"context": "the sea the", "answer": word} for word in WORDS[:5])],
}


@pytest.fixture(scope="module")
def tasks(inputs) -> Path:
    folder = inputs / "tasks"
    folder.mkdir()
    for name, records in FILES.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture(scope="module")
def model(inputs):
    """A random model in transformers, and imported as `mine`."""
    pytest.importorskip("transformers")
    made_model = made("llama3", inputs / "hub")
    assert main(["import", str(inputs / "hub"), str(inputs / "mine")]) == 0
    return made_model


def log_likelihood(model, given: bytes | list[int], text: bytes, context: int = CONTEXT) -> tuple[float, bool]:
    """By transformers, of one text; the last tokens of what is given that the window has room for."""
    import torch

    tokens = [*(given or [END]), *text][-(context + 1) :]
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0].double()
    scores = torch.log_softmax(logits, -1)[-len(text) :].numpy()
    return float(scores[np.arange(len(text)), list(text)].sum()), bool((scores.argmax(-1) == list(text)).all())


def stripped(context: str, continuation: str) -> tuple[bytes, bytes]:
    kept = context.rstrip()
    return kept.encode(), (context[len(kept) :] + continuation).encode()


def expected_figures(model) -> dict[str, float]:
    """All figures, by loops over lines and choices."""
    found: dict[str, list[float]] = {}
    for name, (settings, *records) in FILES.items():
        for record in records:
            start, delimiter = settings.get("prefix", ""), settings.get("delimiter", " ")
            if settings["kind"] == "greedy_match":
                loss, greedy = log_likelihood(model, *stripped(record["context"], f" {record['answer']}"))
                found.setdefault(f"acc.{name}", []).append(greedy)
                found.setdefault(f"loss.{name}", []).append(-loss)
                continue
            sums, means = [], []
            for choice in record["choices"]:
                if settings["kind"] == "cloze":
                    before, after = record["context"].split("_")
                    given, text = stripped(before + choice, after)
                else:
                    given, text = stripped(start + record["context"], delimiter + choice)
                sums.append(log_likelihood(model, given, text)[0])
                means.append(sums[-1] / len(choice) if choice else -math.inf)
            found.setdefault(f"acc.{name}", []).append(sums.index(max(sums)) == record["answer"])
            if settings["kind"] == "multiple_choice":
                found.setdefault(f"acc_norm.{name}", []).append(means.index(max(means)) == record["answer"])
    figures = {}
    for key, values in found.items():
        figure, _, name = key.partition(".")
        mean = sum(values) / len(values)
        error = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
        if figure == "loss":
            figure, mean, error = "perplexity", math.exp(mean), math.exp(mean) * error
        figures |= {f"{figure}.{name}": mean, f"{figure}_stderr.{name}": error}
    return figures


def test_figures_are_those_of_transformers(gregale, printed, tasks, model, capsys):
    capsys.readouterr()
    files = sorted(str(path) for path in tasks.glob("*.jsonl"))
    assert gregale("eval", "mine", "--tasks", *files, "--json") == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    expected = expected_figures(model)
    assert figures.pop("step") == 0
    assert figures.keys() == expected.keys()
    for key, value in figures.items():
        assert value == pytest.approx(expected[key], rel=1e-4), key
    assert 0 < figures["acc.choice"] < 1, "some are right"
    assert "choice: questions longer than the model's context, which are cut on the left: 1 of 13." in err
    table = printed("eval", "mine", "--tasks", str(tasks / "*.jsonl"))
    assert f"{figures['acc.choice']:.4g} ± {figures['acc_stderr.choice']:.2g}" in table


def test_generated_answers_are_those_of_transformers(evaluated, inputs, model):
    import torch

    prompt = "the sea: "
    given = torch.tensor([[*prompt.encode()]])
    drawn = model.generate(given, max_new_tokens=256, do_sample=False)[0, given.shape[1] :]
    ids = drawn.numpy()
    answer = BytesTokenizer().decode(ids[: np.argmax([*(ids == END), True])]).partition("\n\n")[0]
    lines = [{"kind": "exact_match"}, {"context": prompt, "answer": answer}, {"context": "the ", "answer": "nothing"}]
    (inputs / "made.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert evaluated("mine", "--tasks", "made.jsonl")["exact_match.made"] == 0.5


def test_sliding_windows_are_those_of_transformers(inputs, model, evaluated):
    texts = ["the wind", LONG, LONG[5:] + "\u6d77", "a " * 40]
    (inputs / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    stride = 24
    totals, sizes = [], []
    for text in (text.encode() for text in texts):
        total, end = 0.0, 0
        while end < len(text):
            begin, end = end, min(end + (stride if end else CONTEXT), len(text))
            total -= log_likelihood(model, [END, *text[:begin]], text[begin:end])[0]
        totals.append(total)
        sizes.append(len(text))
    figures = evaluated("mine", "--data", "corpus.jsonl", "--stride", stride)
    loss = sum(totals) / sum(sizes)
    error = math.sqrt(sum((t - loss * n) ** 2 for t, n in zip(totals, sizes, strict=True)) * 4 / 3) / sum(sizes)
    expected = {"eval_loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2)}
    errors = {"eval_loss": error, "perplexity": math.exp(loss) * error, "bits_per_byte": error / math.log(2)}
    assert figures == pytest.approx(
        {"step": 0, **expected, **{f"{name}_stderr": value for name, value in errors.items()}}, rel=1e-4
    )


def test_bits_are_those_of_the_bytes_of_the_text(gregale, inputs, model, evaluated):
    """With a tokenizer that puts a space before a text, and makes two letters of a ligature of three bytes."""
    saved = json.loads((inputs / "hub" / "tokenizer.json").read_text())
    saved["normalizer"], saved["pre_tokenizer"]["add_prefix_space"] = {"type": "NFKC"}, True
    shutil.copytree(inputs / "hub", inputs / "spaced-hub")
    (inputs / "spaced-hub" / "tokenizer.json").write_text(json.dumps(saved))
    assert gregale("import", "spaced-hub", "spaced") == 0
    texts = {"wind": 5, "a sea": 6, "\ufb01" * 40: 81}  # tokens of each
    (inputs / "ligatures.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (inputs / "ligatures.txt").write_text("\ufb01" * 40)
    figures = evaluated("spaced", "--data", "ligatures.jsonl", "--stride", CONTEXT)
    bits, size = figures["eval_loss"] / math.log(2) * sum(texts.values()), sum(len(text.encode()) for text in texts)
    assert figures["bits_per_byte"] == pytest.approx(bits / size)
    figures = evaluated("spaced", "--data", "ligatures.txt")  # of 32; the space, not scored, has a byte of the first
    assert figures["bits_per_byte"] == pytest.approx(figures["eval_loss"] / math.log(2) * CONTEXT / (32 * 3 - 1))


def test_names_of_special_tokens_in_tasks_are_told_or_are_the_tokens(printed, inputs, model):
    record = {"context": "the <|end_of_document|>", "choices": ["sea", "wind"], "answer": 0}
    (inputs / "special.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(TIE))
    told = "2 names of special tokens in the tasks are encoded as characters, most often <|end"
    assert told in printed("eval", "mine", "--tasks", "special.jsonl")
    assert "special tokens" not in printed("eval", "mine", "--tasks", "special.jsonl", "--parse_special")


def test_texts_are_scored_together(model, gregale):
    """With a program for each length, not for each text; the figures of each are its own."""
    trained = open_trained("mine", None, None)
    evaluation = SlidingEvaluation(trained.setup, BytesTokenizer(), CONTEXT, ())
    texts = {"a": [stream_of(3), stream_of(70, 0)], "b": [stream_of(9), stream_of(40)], "": [stream_of(5)]}
    found = evaluation(trained.model, texts)
    assert evaluation._scorer._sums._cache_size() == len(halves(CONTEXT))
    assert list(found) == list(texts)
    for name, streams in texts.items():
        (alone,) = evaluation(trained.model, {name: streams}).values()
        np.testing.assert_array_equal(found[name].tokens, alone.tokens)
        np.testing.assert_allclose(found[name].losses, alone.losses, rtol=1e-5)
        np.testing.assert_array_equal(found[name].sizes, alone.sizes)


def test_what_cannot_be_scored_is_told_with_its_line(refused, tasks, inputs, model):
    wrong = inputs / "wrong.jsonl"

    def told(*records: dict[str, Any]) -> str:
        wrong.write_text("".join(json.dumps(record) + "\n" for record in records))
        return refused("eval", "mine", "--tasks", "wrong.jsonl")

    settings = {"kind": "multiple_choice", "delimiter": ""}
    assert "wrong.jsonl, line 2: nothing is left to score" in told(settings, {**TIE, "choices": ["", "a"], "answer": 0})
    assert "wrong.jsonl, line 1: a choice or answer has 65 tokens" in told(
        {**TIE, "choices": ["a" * 64, "b"], "answer": 0}
    )
    assert "wrong.jsonl, line 2: `answer` is 9" in told(settings, {**TIE, "answer": 9})
    told(settings, {**TIE, "choices": ["", "a"], "answer": 0})
    before_the_text = refused("eval", "mine", "--tasks", "wrong.jsonl", "--data", "none-*.txt")
    assert "nothing is left to score" in before_the_text
    training = "train", "tiny.yaml", "--name", "never", "--evaluation.tasks", "wrong.jsonl"
    assert "eval nowhere" not in refused("eval", "nowhere", "--tasks", "wrong.jsonl")
    wrong.write_text('{"context": "a"\n')
    assert "wrong.jsonl, line 1: not JSON" in refused(*training)
    assert not (inputs / "runs" / "never").exists()
    assert "stride is 65" in refused("eval", "mine", "--data", "text/*.txt", "--stride", "65")
    several = ["--data", "text/0.txt", "corpus.jsonl"]
    assert "several kinds: jsonl and text" in refused("eval", "mine", *several)
    assert "are about text" in refused("eval", "mine", "--tasks", "a", "--stride", "4")


STEPS = ["--steps=4", "--optimizer.schedule.warmup=1", "--model.parametrisation.base_hidden=16"]


@pytest.fixture(scope="module")
def run(inputs, tasks) -> Path:
    """A run that scores tasks beside its held-out text."""
    chosen = ["--evaluation.every", "2", "--evaluation.tasks", "[tasks/gap.jsonl, tasks/match.jsonl]"]
    chosen += ["--export.every", "4", "--data.validation", "{words: {type: text, files: [text/0.txt]}}"]
    return trained(inputs, "tiny.yaml", "tasked", *STEPS, *chosen)


MEASURED = (("gap", "acc"), ("match", "acc"), ("match", "perplexity"))


def test_a_run_scores_tasks_at_each_evaluation(printed, run, evaluated):
    first, last = (line for line in lines(run) if "eval_loss" in line)
    assert (first["step"], last["step"]) == (2, 4)
    names = [f"{figure}{error}.{task}" for task, figure in MEASURED for error in ("", "_stderr")]
    texts = [f"{figure}{of}" for of in ("", ".words") for figure in ("eval_loss", "bits_per_byte")]
    assert list(last) == ["step", *texts, *names]
    assert last["perplexity.match"] < first["perplexity.match"], "it learns its words"
    assert evaluated("tasked") == last
    alone = evaluated("tasked", "--tasks", "tasks/match.jsonl")
    text, table = printed("eval", "tasked", "--stride", "32").split("± the standard error\n")
    assert "; words: " in text
    assert "perplexity" in table
    assert "bits_per_byte" not in table, "it has figures of tasks alone"
    assert alone == pytest.approx({"step": 4} | {name: last[name] for name in names if "match" in name}, rel=1e-5)


def test_every_mesh_finds_what_transformers_finds_of_the_export(gregale, run, inputs):
    """Also with a vocabulary that is filled up for the mesh: what fills it up has no probability."""
    transformers = pytest.importorskip("transformers")
    tokenizer, found = load_tokenizer(run), []
    for devices in (1, None):
        trained = open_trained("tasked", None, devices)
        assert trained.setup.Vocab.size > tokenizer.vocabulary_size
        continuations = encoded(
            [pair for task in read_tasks(["tasks/*.jsonl"]) for each in task.questions for pair in each.pairs],
            tokenizer,
            (),
        )
        found.append(Scorer(trained.setup, tokenizer)(trained.model, continuations))
    one, several = found
    np.testing.assert_allclose(one.log_likelihoods, several.log_likelihoods, rtol=1e-5)
    np.testing.assert_array_equal(one.greedy, several.greedy)
    assert gregale("export", "tasked", inputs / "out") == 0
    while_it_trained = run / "exports" / folder_name(4)
    for name in {*os.listdir(inputs / "out")} - {"README.md"}:  # which has the evaluation after the last step too
        assert (inputs / "out" / name).read_bytes() == (while_it_trained / name).read_bytes(), name
    exported = transformers.AutoModelForCausalLM.from_pretrained(inputs / "out", attn_implementation="eager")
    for continuation, value, greedy in zip(continuations, *one, strict=True):
        given, text = np.split(continuation.tokens, [-continuation.scored])
        expected = log_likelihood(exported, given.tolist(), bytes(text.tolist()), context=32)
        assert (value, greedy) == (pytest.approx(expected[0], rel=1e-4), expected[1])


def test_tasks_alone_make_an_evaluation(printed, run, evaluated, refused):
    arguments = [*STEPS, "--data.held_out=0", "--evaluation.tasks=tasks/match.jsonl", "--evaluation.every=4"]
    assert "Done. Tasks: match acc " in printed("train", "tiny.yaml", "--name", "alone", *arguments)
    (figures,) = [line for line in lines(run.parent / "alone") if "acc.match" in line]
    assert "eval_loss" not in figures
    assert evaluated("alone") == figures
    assert "has no text to evaluate on" in refused("eval", "alone", "--stride", "4")
    assert "alone is complete" in printed("train", "tiny.yaml", "--name", "alone", *arguments)
