"""A pipelined run through the command line: it is evaluated, also without a pipeline, and sampled."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gregale.data.preparation import prepare
from gregale.data.tokenizers import load_tokenizer
from gregale.inference.generate import Sampling
from gregale.programs.runtime.evaluation import Evaluator, evaluation_text
from gregale.programs.runtime.sampler import training_sampler
from gregale.programs.runtime.trained_model import open_trained
from tests.model import oracle
from tests.programs.tiny import lines, trained

COMMON = ["--steps=4", "--batch.microbatches=1", "--model.layers=4", "--mesh.model=1", "--mesh.stage=2"]
COMMON += ["--pipeline.repeats=2"]


@pytest.fixture(scope="module")
def run(inputs) -> Path:
    """The directory of the undisturbed run, in two stages of layers 0 and 2, 1 and 3."""
    return trained(inputs, "tiny.yaml", "pipelined", *COMMON)


def greedy_by_full_passes(trained, prompt: str, count: int) -> str:
    """The likeliest token again and again, by whole forward passes of the plain model over padded tokens."""
    config = trained.setup.config.model
    weights = jax.tree.map(jnp.asarray, oracle.plain_weights(jax.device_get(trained.model)))
    ids = list(prompt.encode())
    length = len(ids) + count
    place = np.arange(length)
    logits = jax.jit(lambda tokens: oracle.logits(weights, tokens, place, np.zeros(length), config))
    for at in range(len(ids), length):
        padded = np.zeros(length, np.int32)
        padded[:at] = ids
        ids.append(int(np.argmax(np.asarray(logits(padded))[at - 1, :257])))
    assert 256 not in ids, "the text ended; the comparison would be short"
    return bytes(ids[-count:]).decode(errors="replace")


def test_it_is_evaluated_on_its_own_mesh_and_sampled_on_one_device(run, gregale, evaluated, capsys):
    """By the commands, and by a run, which has the model in stages; saved layers are in the model's order."""
    (evaluation,) = [line for line in lines(run) if "eval_loss" in line]
    assert evaluated(run.name) == evaluation
    on_one = open_trained(str(run), None, devices=1)
    config = on_one.setup.config
    corpus = prepare(config.data, config.batch.sequence_length, config.seed)
    alone = Evaluator(on_one.setup, evaluation_text(corpus, config), corpus.tokenizer.token_bytes)(on_one.model, None)
    assert alone["eval_loss"] == pytest.approx(evaluation["eval_loss"], rel=1e-5)
    prompt = "the wind "
    assert gregale("sample", run.name, prompt, "--temperature", "0", "--tokens", "8") == 0
    expected = greedy_by_full_passes(on_one, prompt, 8)
    assert capsys.readouterr().out == prompt + expected + "\n"
    in_stages = open_trained(str(run), None, devices=None)
    sampler = training_sampler(in_stages.setup, load_tokenizer(run))
    assert sampler.texts(sampler.prepared(in_stages.model), [prompt], 8, Sampling(0)) == [expected]
