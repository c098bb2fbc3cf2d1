"""Runs with adapters: PEFT as the oracle, checkpoints without frozen weights, folders of PEFT in and out."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from gregale.axes.layout import is_named
from gregale.axes.parameters import frozen_of, with_arrays
from gregale.cli import main
from gregale.data.tokenizers import load_tokenizer
from gregale.huggingface.tensor_names import parameters_of
from gregale.model.losses import losses_of
from gregale.programs.runtime.adapters import family_of, slots_of_adapters
from gregale.programs.runtime.setup import Setup, set_up
from gregale.programs.runtime.trained_model import Base, base_model, find_run, open_trained
from gregale.programs.train.resume import started_state
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.training.state import TrainState
from tests.huggingface.hub import VOCABULARY, made
from tests.mesh.support import placed
from tests.packages import Package
from tests.programs.tiny import assert_same_state, checkpoint_steps, losses, saved_state, write_config

torch, transformers, peft = Package("torch"), Package("transformers"), Package("peft")

STEPS, ROWS, POSITIONS = 20, 8, 16
RATE, DECAY = 1e-2, 0.1
MESH = {"replica": 2, "data": 2, "model": 2}
PROJECTIONS = {
    **{"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"},
    **{"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
}
TWINS = {  # a family, its targets, and the scaling
    "llama2": (("query", "value"), "standard"),
    "qwen2": (tuple(PROJECTIONS), "rank_stabilised"),
}


def batch_of(step: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(step).integers(0, VOCABULARY, (ROWS, POSITIONS + 1), dtype=np.int32)
    mask = np.ones((ROWS, POSITIONS), np.float32)
    mask[: ROWS // 2, :3] = 0  # the replicas have unequally many tokens
    positions = np.tile(np.arange(POSITIONS, dtype=np.int32), (ROWS, 1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask, "positions": positions}


def of_peft(model: Any, name: str) -> Any:
    targets, scaling = TWINS[name]
    modules, stabilised = [PROJECTIONS[target] for target in targets], scaling != "standard"
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, lora_dropout=0.0, use_rslora=stabilised)
    return peft.get_peft_model(model, settings)


def torch_losses(model: Any) -> list[float]:
    """Train the adapters of a PEFT model in plain torch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    found = []
    for step in range(STEPS):
        batch = {name: torch.tensor(array) for name, array in batch_of(step).items()}
        logits = model(batch["tokens"].long()).logits.transpose(1, 2)
        each = torch.nn.functional.cross_entropy(logits, batch["targets"].long(), reduction="none")
        loss = (each * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


def setup_of(name: str, imported: Path, adapters: Path | None) -> Setup:
    targets, scaling = TWINS[name]
    config = yaml.safe_load((imported / "config.yaml").read_text())
    schedule = {"type": "constant", "warmup": 0}
    keys = {
        "name": "twin",
        "steps": STEPS,
        "start_from": str(imported),
        "cpu_devices": 8,
        "model": config["model"] | {"row_multiple": 8},
        "mesh": MESH,
        "adapter": {"rank": 4, "alpha": 8.0, "targets": list(targets), "scaling": scaling},
        "compute": {"dtype": "float32"},
        "batch": {"size": ROWS, "sequence_length": POSITIONS, "microbatches": 2},
        "optimizer": {"learning_rate": RATE, "weight_decay": DECAY, "clip_norm": None, "schedule": schedule},
        "data": {"sources": {"none": {"type": "text", "files": ["none"]}}, "tokenizer": config["data"]["tokenizer"]},
    }
    if adapters is not None:
        keys["adapter"]["start_from"] = str(adapters)
    return set_up(load(TrainConfig, keys), load_tokenizer(imported).vocabulary_size)


def batches(setup: Setup):
    for step in range(STEPS):
        named = {name: setup_array(setup, array) for name, array in batch_of(step).items()}
        yield placed(named, setup.layout, setup.layout.compute)


def setup_array(setup: Setup, array: np.ndarray):
    import haliax as hax

    return hax.named(array, setup.batch_axes)


@pytest.mark.parametrize("name", TWINS)
def test_twenty_steps_equal_those_of_torch_with_peft(name, tmp_path):
    theirs = of_peft(made(name, tmp_path / "hub"), name)
    theirs.save_pretrained(tmp_path / "peft")
    assert main(["import", str(tmp_path / "hub"), str(tmp_path / "mine")]) == 0
    setup = setup_of(name, tmp_path / "mine", tmp_path / "peft")
    base = Base.of(setup.config)
    state = started_state(setup, load_tokenizer(tmp_path / "mine"), base)
    assert_equal_loss(setup, base_model(setup, base), state)
    take, found = setup.stepper(), []
    for step, batch in enumerate(batches(setup), 1):
        state, report = take(state, batch, step)
        found.append(float(report.metrics.loss))
    np.testing.assert_allclose(found, torch_losses(theirs), atol=5e-5, rtol=0)
    trained = {key.replace(".default", ""): value for key, value in theirs.named_parameters() if "lora" in key}
    leaves = parameters_of(state.method.parameters)
    slots = slots_of_adapters(setup, family_of(setup, find_run(str(tmp_path / "mine"))))
    assert len(slots) == 2 * len(TWINS[name][0])
    for slot in slots:
        for key, place in slot.tensors().items():
            wanted = slot.as_parameter(trained.pop(key).detach().numpy())
            np.testing.assert_allclose(leaves[slot.path].array[place], wanted, atol=1e-5, rtol=0, err_msg=key)
    assert not trained


def assert_equal_loss(setup: Setup, plain: Any, state: TrainState) -> None:
    """Before the first step, the loss is that of the base to the last bit."""
    batch, run = next(batches(setup)), setup.evaluation_execution()
    adapted = with_arrays(jax.jit(setup.method.eval_model)(state.method), state.frozen)

    @jax.jit
    def loss(model):
        return losses_of(model.loss(batch, run)).loss

    assert float(loss(plain)) == float(loss(adapted)) > 0
