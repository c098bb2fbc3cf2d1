"""`gregale sample`: what is drawn, that neither cache nor batch nor mesh changes it, and how it is told."""

import io
import json
import re
from dataclasses import replace

import jax
import pytest

from gregale.axes.layout import MeshConfig
from gregale.data.tokenizers import load_tokenizer
from gregale.inference.generate import Generator, Sampling
from gregale.programs.runtime.sampler import steady, training_sampler
from gregale.programs.runtime.trained_model import on_devices, open_trained, set_up_run
from gregale.programs.sample import context_of
from gregale.runs.config import BatchConfig, EvaluationConfig, TrainConfig
from gregale.runs.run_directory import RunDirectory

GREEDY = Sampling(temperature=0)
PROMPT = "the wind "


@pytest.fixture(scope="module")
def trained(inputs, whole):
    return open_trained(str(whole), None, devices=1)


class Writer:
    """A sampler with its model."""

    def __init__(self, trained, folder):
        self.sampler = training_sampler(trained.setup, load_tokenizer(folder))
        self.model = self.sampler.prepared(trained.model)

    def text(self, prompt: str, count: int, sampling: Sampling) -> str:
        return self.sampler.texts(self.model, [prompt], count, sampling)[0]


@pytest.fixture(scope="module")
def sampler(trained, whole):
    return Writer(trained, whole)


def test_a_run_on_a_mesh_samples_the_same_on_one_device_by_its_seed(whole, sampler):
    across = open_trained(str(whole), None, devices=None)
    assert across.setup.layout.mesh.size == 8
    writer = Writer(across, whole)
    assert {leaf.sharding.num_devices for leaf in jax.tree.leaves(writer.model)} == {1}
    drawn = Sampling(1.0, seed=4)
    assert writer.text(PROMPT, 24, drawn) == sampler.text(PROMPT, 24, drawn) != sampler.text(PROMPT, 24, Sampling(1.0))


def test_blocks_are_as_large_as_a_reader_has_patience_for(monkeypatch):
    """Sizes double while a block takes no time, stay where it takes most of the maximum delay, and halve beyond it."""
    now = 0.0
    monkeypatch.setattr("gregale.programs.runtime.sampler.perf_counter", lambda: now)
    sizes = steady(0.1)
    assert [next(sizes) for _ in range(7)] == [1, 2, 4, 8, 16, 32, 32]
    found = []
    for token_s in (0.02, 0.02, 0.002, 0.002):
        now += (found[-1] if found else 32) * token_s
        found.append(next(sizes))
    assert found == [16, 8, 16, 32]


def test_a_run_makes_its_texts_together(sampler, monkeypatch):
    """In batches of as many rows; each is what it is by itself."""
    monkeypatch.setattr("gregale.programs.runtime.sampler.MAX_BATCH", 2)
    prompts, drawn, batches = [PROMPT, "", "sea"], Sampling(1.0, seed=4), []
    blocks = Generator.blocks

    def counted(self, model, prompts, *rest):
        batches.append(len(prompts))
        return blocks(self, model, prompts, *rest)

    monkeypatch.setattr(Generator, "blocks", counted)
    texts = sampler.sampler.texts(sampler.model, prompts, 12, drawn)
    assert batches == [2, 2]
    assert texts == [sampler.text(prompt, 12, drawn) for prompt in prompts]


def test_prompt_and_continuation_are_printed_and_a_text_that_outgrows_the_context_is_told(
    gregale, whole, sampler, capsys
):
    for tokens in (23, 24):
        text = sampler.text(PROMPT, tokens, GREEDY)
        assert len(text.encode()) == tokens, "no end ended it"
        assert gregale("sample", "whole", PROMPT, "--temperature", "0", "--tokens", tokens) == 0
        out, err = capsys.readouterr()
        assert out == f"{PROMPT}{text}\n"
        words = "1 text became longer than the model's context of 32 tokens. It never saw a longer one"
        assert (words in err) == (tokens == 24)


def results(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def four(inputs) -> list[dict]:
    """Prompts in `four.jsonl`; and `long.txt`, with one that is too long."""
    asked = [
        {"prompt": PROMPT, "seed": 3, "id": "first"},
        {"prompt": "north"},
        {"prompt": "a g", "seed": 5},
        {"prompt": PROMPT, "seed": 4, "id": 4},
    ]
    (inputs / "four.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    (inputs / "long.txt").write_text("sea\n" + "x" * 33 + "\n")
    return asked


DRAWN = ["--temperature", "1", "--top_p", "0.9", "--tokens", "20", "--seed", "9"]


@pytest.fixture(scope="module")
def one_by_one(four, sampler) -> list[str]:
    drawn = [(line["prompt"], 20, Sampling(1.0, top_p=0.9, seed=line.get("seed", 9))) for line in four]
    return [sampler.text(*each) for each in drawn]


def test_prompts_of_a_file_give_what_each_gives_alone(gregale, inputs, whole, four, one_by_one, tmp_path, capsys):
    assert gregale("sample", "whole", "--prompts", "four.jsonl", "--out", tmp_path / "out.jsonl", *DRAWN) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"4 prompts, \d+ tokens: the first after [\d.]+ s(, then [\d,.]+ tokens/s)?\n", err)
    found = results(tmp_path / "out.jsonl")
    assert [line["text"] for line in found] == one_by_one
    assert [(line.get("id"), line["prompt"]) for line in found] == [(each.get("id"), each["prompt"]) for each in four]
    assert [line["seed"] for line in found] == [3, 9, 5, 4]
    assert {line["ended"] for line in found} <= {"tokens", "end"}
    assert list(found[0]) == ["id", "prompt", "text", "tokens", "ended", "seed"]


def test_neither_order_nor_batch_nor_mesh_changes_a_text(gregale, inputs, whole, four, one_by_one, capsys):
    (inputs / "three.jsonl").write_text("".join(json.dumps(four[i]) + "\n" for i in (2, 3, 1)))
    mesh = ["--batch", "3", "--mesh.context", "2", "--mesh.data", "2", "--mesh.model", "2"]
    assert gregale("sample", "whole", "--prompts", "three.jsonl", *mesh, *DRAWN) == 0
    found = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert found == [one_by_one[i] for i in (2, 3, 1)]


def test_devices_need_not_divide_the_sequences_of_a_step(whole):
    """Neither their number nor their length, nor the lengths of an evaluation, which another mesh makes."""
    batch, evaluation = BatchConfig(size=3, sequence_length=30), EvaluationConfig(sequence_lengths=[10])
    config = replace(RunDirectory(whole).read_config(), batch=batch, evaluation=evaluation)
    found = set_up_run(RunDirectory(whole), on_devices(config, MeshConfig(context=2, data=4))).config.batch
    assert (found.size, found.sequence_length) == (4, 32)


def test_the_context_is_that_of_the_import_or_of_longer_training(tmp_path):
    run = RunDirectory(tmp_path)
    run.huggingface.mkdir(parents=True)
    for length, context in ((16, 64), (128, 128)):
        run.write_config(TrainConfig("longer", 1, batch=BatchConfig(sequence_length=length)))
        (run.huggingface / "config.json").write_text('{"max_position_embeddings": 64}')
        assert context_of(run) == context


def test_a_text_ends_before_a_stop_string(gregale, inputs, whole, sampler, capsys, tmp_path):
    """Of bytes, so that the string spans several tokens; in a batch with one that it does not end."""
    full = sampler.text(PROMPT, 24, GREEDY)
    stop = full[9:13]
    expected = full[: full.index(stop)]
    options = ["--temperature", "0", "--tokens", "24", "--stop", json.dumps([stop, "never"])]
    (inputs / "two.txt").write_text(f"{PROMPT}\nq\n")
    assert gregale("sample", "whole", "--prompts", "two.txt", *options) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["text"], first["ended"], first["tokens"]) == (expected, "stop", len((expected + stop).encode()))
    assert second["ended"] != "stop" or stop in sampler.text("q", 24, GREEDY)


class Interrupting(io.StringIO):
    """Standard output at which somebody presses Ctrl-C after some writes."""

    def __init__(self, writes: int):
        super().__init__()
        self._left = writes

    def write(self, text: str) -> int:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_ends_with_what_is_there(gregale, whole, sampler, monkeypatch, capsys):
    stream = Interrupting(4)
    monkeypatch.setattr("sys.stdout", stream)
    assert gregale("sample", "whole", PROMPT, "--temperature", "0", "--tokens", "24") == 130
    shown = stream.getvalue()
    assert (PROMPT + sampler.text(PROMPT, 24, GREEDY)).startswith(shown.removesuffix("\n"))
    assert len(shown) > len(PROMPT) + 1
    assert shown.endswith("\n")
    assert capsys.readouterr().err == "gregale: interrupted\n"


def test_mistakes(refused, whole, four):
    for arguments, message in [
        ([], "RUN"),
        (["nowhere"], "nowhere is not a run directory: nowhere does not exist and runs/nowhere does not exist."),
        (["whole", "--stop", '["a", ""]'], "stop has an empty string"),
        (["whole", "a", "--prompts", "four.jsonl"], "a prompt and prompts 'four.jsonl' are both given"),
        (["whole", "a", "--out", "x.jsonl"], "out is 'x.jsonl', which is for results of `prompts`"),
        (["whole", "--prompts", "long.txt"], "long.txt, line 2 has 33 tokens, and the model's context is 32"),
        (["whole", "sea " * 9], "the prompt has 36 tokens, and the model's context is 32"),
        (["whole", "--mesh.replica", "2"], "mesh.replica is for training"),
    ]:
        assert message in refused("sample", *arguments)
