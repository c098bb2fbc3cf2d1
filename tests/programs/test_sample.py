"""`gregale sample`: what is drawn, and that the cache changes nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gregale.data.tokenizers import load_tokenizer
from gregale.model.generate import Sampling, draw
from gregale.programs.run.trained import open_trained
from gregale.programs.sample import Sampler, steady
from tests.model import oracle

GREEDY = Sampling(temperature=0)
PROMPT = "the wind "


@pytest.fixture(scope="module")
def trained(inputs, whole):
    return open_trained(str(whole), None, devices=1)


class Writer:
    """A sampler with its model."""

    def __init__(self, trained, folder):
        self.sampler = Sampler(trained.setup, load_tokenizer(folder))
        self.model = self.sampler.prepared(trained.model)

    def text(self, prompt: str, count: int, sampling: Sampling) -> str:
        return self.sampler.text(self.model, prompt, count, sampling)


@pytest.fixture(scope="module")
def sampler(trained, whole):
    return Writer(trained, whole)


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


@pytest.mark.parametrize("prompt", [PROMPT, "a", "sea " * 40], ids=["short", "one byte", "longer than in training"])
def test_greedy_is_the_argmax_of_full_passes(trained, sampler, prompt):
    assert len("sea " * 40) > trained.setup.config.batch.sequence_length
    assert sampler.text(prompt, 12, GREEDY) == greedy_by_full_passes(trained, prompt, 12)


def test_a_run_on_a_mesh_samples_the_same_on_one_device(whole, sampler):
    across = open_trained(str(whole), None, devices=None)
    assert across.setup.layout.mesh.size == 8
    writer = Writer(across, whole)
    assert {leaf.sharding.num_devices for leaf in jax.tree.leaves(writer.model)} == {1}
    drawn = Sampling(1.0, seed=4)
    assert writer.text(PROMPT, 24, drawn) == sampler.text(PROMPT, 24, drawn)


def test_a_text_streams_in_pieces(sampler):
    drawn = Sampling(1.0, seed=1)
    pieces = list(sampler.sampler.stream(sampler.model, PROMPT, 24, drawn))
    assert "".join(pieces) == sampler.text(PROMPT, 24, drawn)
    assert len(pieces) > 2


def test_blocks_are_as_large_as_a_reader_has_patience_for(monkeypatch):
    """Sizes double while a block takes no time, stay where it takes most of the patience, and halve beyond it."""
    now = 0.0
    monkeypatch.setattr("gregale.programs.sample.perf_counter", lambda: now)
    sizes = steady(0.1)
    assert [next(sizes) for _ in range(7)] == [1, 2, 4, 8, 16, 32, 32]
    found = []
    for token_s in (0.02, 0.02, 0.002, 0.002):
        now += (found[-1] if found else 32) * token_s
        found.append(next(sizes))
    assert found == [16, 8, 16, 32]


@pytest.mark.parametrize("narrow", [Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6), Sampling(1e-4)], ids=str)
def test_narrow_sampling_is_greedy(sampler, narrow):
    assert sampler.text(PROMPT, 12, narrow) == sampler.text(PROMPT, 12, GREEDY)


def test_a_seed_gives_one_text(sampler):
    texts = [sampler.text(PROMPT, 24, Sampling(1.0, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_command_prints_prompt_and_continuation(gregale, whole, sampler, capsys):
    assert gregale("sample", "whole", PROMPT, "--temperature", "0", "--tokens", "12") == 0
    assert capsys.readouterr().out == PROMPT + sampler.text(PROMPT, 12, GREEDY) + "\n"


def test_an_empty_prompt(gregale, whole, capsys):
    assert gregale("sample", "runs/whole", "--tokens", "5", "--seed", "3") == 0
    first = capsys.readouterr().out
    assert gregale("sample", "runs/whole", "", "--tokens", "5", "--seed", "3") == 0
    assert capsys.readouterr().out == first != ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "RUN"),
        (["nowhere"], "nowhere is not a run directory"),
        (["whole", "--temperature", "-1"], "temperature is -1 (on the command line); it has to be at least 0"),
        (["whole", "--top_k", "0"], "top_k is 0 (on the command line); it has to be at least 1"),
        (["whole", "--top_p", "1.5"], "top_p is 1.5 (on the command line); it has to be above 0 and at most 1"),
        (["whole", "--tokens", "0"], "tokens is 0 (on the command line); it has to be at least 1."),
        (["whole", "--heat", "1"], "`heat` (on the command line) is not a valid key"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and value else "",
)
def test_mistakes(gregale, whole, capsys, arguments, message):
    assert gregale("sample", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


LOGITS = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (Sampling(1.0, top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(1.0, top_k=9), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(1.0, top_p=0.6), [0.625, 0.375, 0, 0]),
        (Sampling(1.0, top_p=0.85), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (Sampling(1.0, top_k=3, top_p=0.5), [1, 0, 0, 0]),
        (Sampling(0), [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_probability(sampling, expected):
    keys = jax.random.split(jax.random.key(0), 20_000)
    tokens = jax.jit(jax.vmap(lambda key: draw(LOGITS, sampling, key)))(keys)
    found = np.bincount(np.asarray(tokens), minlength=4) / len(keys)
    np.testing.assert_allclose(found, expected, atol=0.012)
    assert (found[np.asarray(expected) == 0] == 0).all()
