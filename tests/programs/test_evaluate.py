"""`gregale eval`, and the held-out loss against an evaluation a token at a time."""

import math
from dataclasses import replace
from itertools import groupby

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gregale.data.preparation import prepare
from gregale.programs.runtime import evaluation
from gregale.programs.runtime.trained_model import open_trained
from gregale.runs.config import EvaluationConfig
from gregale.runs.run_directory import RunDirectory
from tests.model import oracle
from tests.programs.tiny import lines


@pytest.fixture(scope="module")
def final(whole):
    """The run's own last evaluation: all held-out batches."""
    return lines(whole)[-1]


def test_it_is_the_last_evaluation_of_the_run(printed, final, evaluated):
    assert evaluated("whole") == final
    assert evaluated("runs/whole", "--step", "12", "--batches", "1000") == final
    assert evaluated("whole", "--batches", "1")["eval_loss"] != final["eval_loss"]
    assert evaluated("whole", "--step", "4")["eval_loss"] > final["eval_loss"], "before it was trained"
    assert printed("eval", "whole").splitlines()[-1] == (
        f"runs/whole at step 12: held-out loss {final['eval_loss']:.4f} nats a token, "
        f"{final['bits_per_byte']:.4f} bits per byte"
    )


def slow_loss(model, config, documents: list[list[int]], length: int) -> tuple[float, int, int]:
    """Sum of losses in nats, targets, bytes of the targets: document after document cut at multiples of `length`.

    A window shows `length` tokens of the stream, and what belongs to another document is neither seen nor a target. The
    first token of a stream is no target, nor are those after the last whole window.
    """
    weights = jax.tree.map(jnp.asarray, oracle.plain_weights(jax.device_get(model)))
    logits = jax.jit(lambda tokens: oracle.logits(weights, tokens, np.arange(length), np.zeros(length), config))
    stream = [(token, number) for number, document in enumerate(documents) for token in document]
    total, targets, size = 0.0, 0, 0
    for start in range(0, (len(stream) - 1) // length * length, length):
        for number, places in groupby(range(start, start + length), lambda place: stream[place][1]):
            own = list(places)
            seen = np.zeros(length, np.int32)  # one document alone, from position 0; what follows is filling
            seen[: len(own)] = [stream[place][0] for place in own]
            found = np.asarray(logits(seen), np.float64)
            for row, place in zip(found, own, strict=False):
                target, belongs_to = stream[place + 1]
                if belongs_to == number:
                    total += np.log(np.exp(row - row.max()).sum()) + row.max() - row[target]
                    targets += 1
                    size += target < 256  # a byte; the end of the document stands for none
    return total, targets, size


def test_the_loss_is_that_of_every_held_out_token_once(gregale, whole, final):
    config = RunDirectory(whole).read_config()
    trained = open_trained("whole", None, devices=None)
    stream = prepare(config.data, config.batch.sequence_length, config.seed).held_out_streams["words"]
    tokens, numbers = stream.read(0, len(stream))
    documents = [tokens[numbers == number].tolist() for number in np.unique(numbers)]
    assert len(documents) > 1, "boundaries are met"
    assert len(stream) % config.batch.sequence_length > 1, "a part of a window is left over"
    loss, targets, size = slow_loss(trained.model, config.model, documents, config.batch.sequence_length)
    assert final["eval_loss"] == pytest.approx(loss / targets, rel=1e-5)
    assert final["bits_per_byte"] == pytest.approx(loss / math.log(2) / size, rel=1e-5)
    assert final["bits_per_byte"] != pytest.approx(loss / math.log(2) / targets, rel=1e-5), "ends are no bytes"


def test_losses_by_length_and_by_position(gregale, whole, final, monkeypatch):
    """In sequences of 16 and 32 tokens, the longer of which is the run's own; positions by a token at a time."""
    monkeypatch.setattr(evaluation, "FIRST_POSITIONS", 4)
    trained = open_trained("whole", None, 1)
    config = replace(trained.setup.config, evaluation=EvaluationConfig(sequence_lengths=[16, 32], by_position=True))
    setup = replace(trained.setup, config=config)
    corpus = prepare(config.data, config.batch.sequence_length, config.seed)
    text = evaluation.evaluation_text(corpus, config)
    found = evaluation.Evaluator(setup, text, corpus.tokenizer.token_bytes)(trained.model, None)
    assert found["eval_loss"] == pytest.approx(final["eval_loss"], rel=1e-5)
    assert found["eval_loss_length.32"] == found["eval_loss"] < found["eval_loss_length.16"]
    sums = dict.fromkeys([0, 4, 8, 16], (0.0, 0))
    batch = text.lengths[32].rows(range(len(text.lengths[32])))
    named = {name: hax.named(array, ("batch", "position")) for name, array in batch.items()}
    scored, _ = trained.model.scores(named, setup.Vocab.size, setup.evaluation_execution())
    rows = (-np.asarray(scored.array), batch["loss_mask"], batch["positions"])
    for loss, mask, position in zip(*(array.ravel().tolist() for array in rows), strict=True):
        first = max(bound for bound in sums if bound <= position)
        sums[first] = (sums[first][0] + loss * mask, sums[first][1] + mask)
    for first, (loss, weight) in sums.items():
        assert found[f"eval_loss_position.{first}"] == pytest.approx(loss / weight, rel=1e-5)
