"""`gregale.train` and `gregale.load`, as the page on Python shows them, on four of this process's eight devices."""

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest

import gregale
from gregale.cli import main
from gregale.errors import Interrupted
from gregale.optim import AdamWConfig, SgdConfig
from gregale.programs.python_api import _plain
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.docs.pages import API, blocks
from tests.programs.tiny import lines


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Any:
    """What the page's Python leaves: `config`, `result`, `model` and the last `error`'s message."""
    names: dict[str, Any] = {}
    assert jax.device_count() == 8  # it has started, or this process would have four for all other tests
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("api"))
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # restored afterwards
        for block in blocks(API.read_text(), "python"):
            exec(compile(block.replace("print(error)", "message = str(error)"), API.name, "exec"), names)
        yield names


def printed(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_run_is_that_of_the_command(shown):
    result, model = shown["result"], shown["model"]
    assert (result.run, result.steps, result.is_complete) == (Path("runs/small"), 8, True)
    assert model._trained.setup.layout.mesh.size == 4
    assert model.step == 8
    logged = lines(result.run)
    assert [line["step"] for line in logged if "loss" in line] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert result.evaluation == {key: value for key, value in logged[-1].items() if key != "step"}
    assert model.config == load(TrainConfig, shown["config"], ["--steps=8", "--optimizer.learning_rate=0.01"])


def test_the_model_has_the_losses_and_the_samples_of_the_commands(shown, capsys, tmp_path):
    result, model = shown["result"], shown["model"]
    evaluated = json.loads(printed(capsys, "eval", "small", "--json"))
    assert {"step": 8, **model.evaluate()} == evaluated == {"step": 8, **result.evaluation}
    texts = ["import json", "def name(self):\n" * 20]  # shorter and longer than the context of 32
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    files = str(tmp_path / "*.txt")
    slid = json.loads(printed(capsys, "eval", "small", "--json", "--stride", "32", "--data", files))
    assert model.loss(texts) == pytest.approx(slid["eval_loss"], rel=1e-6)
    assert model.evaluate(files, stride=32)["eval_loss"] == slid["eval_loss"]
    greedy = model.sample("def ", tokens=20, temperature=0)
    assert printed(capsys, "sample", "small", "def ", "--tokens", "20", "--temperature", "0") == f"def {greedy}\n"
    assert model.sample(["def ", "class "], 20, temperature=0)[0] == greedy
    assert model.sample("def ", tokens=20, temperature=0, stop=[greedy[4:7]]) == greedy[: greedy.index(greedy[4:7])]


def test_mistakes_have_the_messages_of_the_commands(shown, capsys):
    Path("run.yaml").write_text("name: small\nsteps: 8\noptimiser: sgd\n")
    assert main(["train", "run.yaml"]) == 2
    with pytest.raises(gregale.UserError) as caught:
        gregale.train(Path("run.yaml"))
    assert capsys.readouterr().err == f"gregale: error: {caught.value}\n"
    assert main(["train", "run.yaml", "--optimiser", "sgd"]) == 2
    assert capsys.readouterr().err == f"gregale: error: {shown['message']}\n".replace(
        "as a keyword", "on the command line"
    )
    with pytest.raises(gregale.UserError, match="cannot go on with this configuration: seed 0 -> 1"):
        gregale.train(shown["config"], seed=1)
    model = shown["model"]
    for call, message in (
        (lambda: model.sample("x" * 40), r"^the prompt has 40 tokens, and the model's context is 32"),
        (lambda: model.sample(["", "x" * 40]), r"^prompts\[1\] has 40 tokens"),
        (lambda: model.sample("", tokens=0), r"^tokens is 0; it has to be at least 1"),
        (lambda: model.loss(""), "there is no text"),
        (lambda: model.evaluate("none-*.txt"), r"none-\*\.txt"),
        (lambda: gregale.load("small", step=7), "There is no checkpoint of step 7"),
    ):
        with pytest.raises(gregale.UserError, match=message):
            call()


@pytest.mark.parametrize(("name", "steps"), [("small", 8), ("new", 0)])
def test_an_interrupt_before_the_first_step_ends_the_call_as_one_after_it(shown, monkeypatch, name, steps):
    prepare = "gregale.programs.train.command.prepare_stages"
    monkeypatch.setattr(prepare, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    result = gregale.train(shown["config"], ["--optimizer.learning_rate=0.01"], name=name, steps=9)
    assert (result.steps, result.is_complete, bool(result.evaluation)) == (steps, False, steps > 0)


def test_an_interrupt_of_one_of_several_processes_is_raised(monkeypatch):
    monkeypatch.setattr("gregale.programs.python_api.main", Mock(side_effect=Interrupted(130)))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(Interrupted):
        gregale.train({"name": "a", "steps": 1})


def test_values_of_python_become_those_of_yaml():
    given = {
        "name": "a",
        "steps": np.int64(3),
        "runs": Path("b"),
        "optimizer": SgdConfig(momentum=0.5),
        "mesh": {"data": 2},
    }
    config = load(TrainConfig, _plain(given))
    assert (config.steps, config.runs, config.optimizer, config.mesh.data) == (3, "b", SgdConfig(momentum=0.5), 2)
    changes = {"optimizer": AdamWConfig(betas=(0.5, 0.6)), "mesh": {"replica": 2}, "start_from": None, "name": "c"}
    config = load(TrainConfig, _plain(config), keywords=_plain(changes))
    assert (config.optimizer, config.mesh.data, config.mesh.replica) == (AdamWConfig(betas=(0.5, 0.6)), 2, 2)
    assert (config.name, config.start_from) == ("c", None)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"steps": 0}, "steps is 0 (as a keyword); it has to be at least 1."),
        ({"steps": "1:30"}, "`steps` (as a keyword), line 1: 1:30, a number to the base 60"),
        ({"steps": {1, 2}}, "`steps` (as a keyword) is {1, 2}, a set; expected int"),
        ({"optimizer": {"learning_rat": 1}}, "`optimizer.learning_rat` (as a keyword) is not a valid key"),
        ({"mesh": "{data: [}"}, "`mesh` (as a keyword), line 1, column 9: not readable as YAML"),
    ],
)
def test_a_wrong_keyword_is_called_a_keyword(keywords, words):
    with pytest.raises(gregale.UserError) as caught:
        load(TrainConfig, {"name": "a", "steps": 1}, keywords=_plain(keywords))
    assert str(caught.value).startswith(words)
