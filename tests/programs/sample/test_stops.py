"""Where a stop is seen: between blocks of tokens in a run, and anywhere in the commands."""

import os
import signal
from unittest.mock import Mock

import pytest

from gregale.cli import main
from gregale.data.tokenizers import BytesTokenizer
from gregale.inference.generate import Sampling
from gregale.programs import evaluate, sample
from gregale.programs.runtime.sampler import Sampler, TextFormat


def test_a_run_sees_a_stop_before_each_batch_of_texts_and_after_each_block():
    sampler, seen = Mock(_form=TextFormat(BytesTokenizer())), []
    sampler.filled_up = lambda prompts, rows: prompts
    sampler.pieces = lambda *_: (seen.append(block) for block in "ab")
    Sampler.texts(sampler, None, [[1]] * 9, 4, Sampling(), at_block=lambda: seen.append("stop?"))
    assert seen == ["stop?", "a", "stop?", "b", "stop?"] * 2, "of eight texts, and of one"


@pytest.mark.parametrize(("module", "name"), [(evaluate, "eval"), (sample, "sample")])
def test_sigterm_ends_a_command_that_saves_nothing(module, name, monkeypatch, capsys):
    monkeypatch.setattr("gregale.distributed.signals.Timer", Mock())  # it would end this process
    monkeypatch.setattr(module, "open_trained", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    for each in ("find_run", "load_tokenizer", "context_of", "text_format_of", "counter_of_names"):
        monkeypatch.setattr(sample, each, Mock(return_value=9 if each == "context_of" else Mock()))
    sample.text_format_of.return_value.ids = lambda text: [1]
    sample.counter_of_names.return_value.return_value = {}
    assert main([name, "run"]) == 143
    assert capsys.readouterr().err == "gregale: SIGTERM: there is nothing to save, and the command ends.\n"
