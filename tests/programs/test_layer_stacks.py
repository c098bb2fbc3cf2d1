"""A run of a model with layers of two structures and a buffer, under Streaming DiLoCo: resumed, evaluated, planned."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from gregale.cli import main
from tests.plugins import plugins_from
from tests.programs.tiny import CONFIG, assert_same_state, killed, lines, saved_state, write_inputs

OWN = {
    "plugins": ["two_widths"],
    "model": {"type": "counting", "layers": 2, "hidden": 32, "heads": 2, "mlp": 64, "wide": 96, "wide_layers": [1]},
    "mesh": {"replica": 2, "data": 2, "model": 2},
    "sync": {"type": "streaming_diloco", "period": 2, "fragments": 2, "delay": 1},
    "checkpoint": {"every": 2},
    "evaluation": {"every": 2},
    "inspect": {"every": 2},
    "optimizer": {"type": "adamw", "learning_rate": 0.01, "schedule": {"type": "constant"}},
    "steps": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the run `whole` of 4 steps, and `resumed`, which goes on from its checkpoint of step 2."""
    folder = write_inputs(tmp_path_factory.mktemp("stacks"))
    (folder / "own.yaml").write_text(yaml.safe_dump({**CONFIG, "name": "whole", **OWN}))
    with plugins_from(Path(__file__).parent / "plugins"), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "own.yaml"]) == 0
        killed(folder / "runs" / "whole", folder / "runs" / "resumed", 2)
        assert main(["train", "own.yaml", "--name", "resumed"]) == 0
        yield folder


def test_a_resumed_run_equals_an_undisturbed_one_and_its_buffer_counts_all_tokens(folder):
    assert_same_state(folder / "runs" / "resumed", folder / "runs" / "whole", 4)
    counted = {name: array for name, array in saved_state(folder / "runs" / "whole", 4).items() if "tokens" in name}
    trained = max(line["tokens"] for line in lines(folder / "runs" / "whole") if "loss" in line)
    each_replica, joined = sorted(counted.values(), key=np.ndim, reverse=True)
    assert trained - 4 < each_replica.sum() <= trained, "each replica counts its own tokens, but for masked ones"
    assert joined == each_replica[0]


def test_it_is_evaluated_inspected_and_planned(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["eval", "whole", "--json"]) == 0
    losses = [line["eval_loss"] for line in lines(folder / "runs" / "whole") if "eval_loss" in line]
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(losses[-1], rel=1e-5)
    assert any("parameter_norm/layer.1" in line for line in lines(folder / "runs" / "whole"))
    assert main(["sample", "whole", "the wind", "--tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("the wind")
    assert main(["plan", "own.yaml", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["flops_per_token"] < report["flops_per_token_full_attention"]
