"""DPO against plain torch, on one device and on a mesh; a run on pairs."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest
import yaml

from gregale.axes.layout import is_named, make_mesh
from gregale.cli import main
from gregale.communication.reduce import Accumulated
from gregale.data.tokenizers import load_tokenizer
from gregale.errors import UserError
from gregale.huggingface.families import parameters_of, path_of, slots_of
from gregale.huggingface.peft import adapter_slots
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.trained_model import FrozenSource, family_of
from gregale.programs.train.resume import started_state
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.runs.run_directory import RunDirectory
from gregale.training.state import TrainState
from tests.huggingface.hub import VOCABULARY, made
from tests.mesh.support import placed
from tests.packages import Package
from tests.plugins import EXAMPLES, plugins_from
from tests.programs.tiny import assert_same_state, killed, lines

torch, safetensors = Package("torch"), Package("safetensors.torch")
PAIRS, POSITIONS, BETA, RANK, ALPHA = 4, 32, 0.3, 4, 8.0

generator = np.random.default_rng(0)
TOKENS = generator.integers(0, VOCABULARY, (2 * PAIRS, POSITIONS + 1), dtype=np.int32)
PLACES = np.tile(np.arange(POSITIONS, dtype=np.int32), (2 * PAIRS, 1))
ENDS = generator.integers(6, 14, (2 * PAIRS, 1))
MASK = ((PLACES > 3) & (PLACES < ENDS)).astype(np.float32)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:], "loss_mask": MASK, "positions": PLACES}


def config_of(imported: Path) -> dict[str, Any]:
    theirs = yaml.safe_load((imported / "config.yaml").read_text())
    source = {"type": "chat", "files": ["pairs.jsonl"], "form": "pairs", "packing": "pad"}
    return {
        "name": "tuned",
        "steps": 12,
        "start_from": str(imported),
        "cpu_devices": 8,
        "model": theirs["model"] | {"row_multiple": 8},
        "mesh": {"replica": 2, "data": 2, "model": 2},
        "adapter": {"rank": RANK, "alpha": ALPHA},
        "objective": {"type": "dpo", "beta": BETA},
        "compute": {"dtype": "float32", "loss_block": 8},
        "batch": {"size": 2 * PAIRS, "sequence_length": POSITIONS},
        "optimizer": {"learning_rate": 0.01, "schedule": {"type": "constant", "warmup": 0}},
        "data": {"sources": {"pairs": source}, "tokenizer": theirs["data"]["tokenizer"], "held_out": 0.2, "workers": 1},
        "evaluation": {"every": 6},
    }


def setup_of(imported: Path, *options: str) -> Setup:
    config = load(TrainConfig, config_of(imported), list(options))
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.device_count])
    return set_up(config, load_tokenizer(imported).vocabulary_size, mesh)


class Twin:
    """A model of torch with plain LoRA, whose factors are both not zero."""

    def __init__(self, model: Any):
        self.model, self.scale, self.factors = model.requires_grad_(False), ALPHA / RANK, {}
        for name, layer in model.named_modules():
            if name.endswith(("q_proj", "v_proj")):
                a, b = torch.randn(RANK, layer.in_features) / 4, torch.randn(layer.out_features, RANK) / 4
                self.factors |= {f"base_model.model.{name}.lora_{x}.weight": each for x, each in (("A", a), ("B", b))}
                layer.register_forward_hook(lambda _, given, out, a=a, b=b: out + self.scale * given[0] @ a.T @ b.T)
        for factor in self.factors.values():
            factor.requires_grad_()

    def log_probs(self, scale: float, model: Any = None) -> Any:
        self.scale = scale
        logs = torch.log_softmax((model or self.model)(torch.tensor(BATCH["tokens"]).long()).logits, -1)
        at_target = torch.gather(logs, 2, torch.tensor(BATCH["targets"]).long()[..., None])[..., 0]
        return (at_target * torch.tensor(MASK)).sum(1)

    def dpo(self) -> tuple[float, np.ndarray, dict[str, np.ndarray]]:
        """The mean loss, the rewards [row], and the gradients, as the paper has them."""
        rewards = BETA * (self.log_probs(ALPHA / RANK) - self.log_probs(0.0).detach())
        loss = -torch.nn.functional.logsigmoid(rewards[::2] - rewards[1::2]).mean()
        gradients = torch.autograd.grad(loss, list(self.factors.values()))
        return loss.item(), rewards.detach().numpy(), dict(zip(self.factors, gradients, strict=True))


@pytest.fixture(scope="module")
def twins(tmp_path_factory) -> tuple[Twin, Path]:
    """A model of torch, and the same imported, beside a folder of its adapters."""
    folder = tmp_path_factory.mktemp("twins")
    theirs = Twin(made("llama2", folder / "hub"))
    (folder / "peft").mkdir()
    safetensors.save_file(theirs.factors, folder / "peft" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj"]}
    (folder / "peft" / "adapter_config.json").write_text(json.dumps(settings))
    assert main(["import", str(folder / "hub"), str(folder / "mine")]) == 0
    return theirs, folder / "mine"


ONE = "--mesh={replica: 1, data: 1, model: 1}"


def sums_of(setup: Setup, state: TrainState) -> Accumulated:
    """The sums of BATCH over all replicas."""
    batch = {name: hax.named(array, setup.batch_axes) for name, array in BATCH.items()}

    @jax.jit
    def summed(state, batch):
        method = setup.psdp.holding(state.frozen)
        return method.accumulate_gradients(method.gathered_params(state.method), batch)

    sums = jax.device_get(summed(state, placed(batch, setup.layout, setup.layout.compute)))
    assert sums.weight.array.sum() == PAIRS
    return sums


@pytest.mark.parametrize("options", [[ONE, "--batch.microbatches=2"], []])
def test_loss_rewards_and_gradients_equal_those_of_torch(twins, options):
    theirs, imported = twins
    setup = setup_of(imported, f"--adapter.start_from={imported.parent / 'peft'}", *options)
    base = FrozenSource.of(setup.config.start_from)
    state = started_state(setup, load_tokenizer(imported), base)
    sums = sums_of(setup, state)
    expected, rewards, gradients = theirs.dpo()
    margins, chosen, rejected = rewards[::2] - rewards[1::2], rewards[::2], rewards[1::2]
    assert np.abs(margins).max() > 0.1
    figures = {"margin": margins, "accuracy": margins > 0, "chosen": chosen, "rejected": rejected}
    wanted = {f"reward_{name}": each.mean() for name, each in figures.items()} | {"loss": expected}
    for name, array in {**sums.named, "loss": sums.loss}.items():
        assert array.array.sum() / PAIRS == pytest.approx(wanted.pop(name), abs=1e-5), name
    for slot in adapter_slots(slots_of(setup.base, family_of(setup, base.origin)), setup.model):
        found = parameters_of(sums.gradients)[slot.path].array.sum(0) / PAIRS
        for key, place in slot.tensors().items():
            value = slot.as_parameter(gradients.pop(key).numpy())
            assert np.abs(value).max() > 1e-3
            np.testing.assert_allclose(found[place], value, atol=1e-5, err_msg=key)
    assert not wanted | gradients


@pytest.mark.parametrize("options", [[ONE, "--batch.microbatches=2", "--compute.gather=per_step"], []])
def test_whole_models_compare_with_the_one_before_the_first_step(twins, options):
    theirs, imported = twins
    setup = setup_of(imported, "--adapter=null", *options)
    base, family = FrozenSource.of(setup.config.start_from), family_of(setup, RunDirectory(imported))
    state = started_state(setup, load_tokenizer(imported), base)
    parameters = parameters_of(jax.device_get(state.method.parameters))
    twin = copy.deepcopy(theirs.model).requires_grad_()
    moved, named = dict(parameters), dict(twin.named_parameters())
    slots = [slot.cut_to(VOCABULARY) for slot in slots_of(setup.base, family)]
    for slot in slots:
        array = parameters[slot.path].array.copy()
        for key, place in slot.tensors().items():
            with torch.no_grad():
                named[key] += torch.randn(named[key].shape) / 50
            value = slot.as_parameter(named[key].detach().numpy())
            array[place][real(value)] = value
        moved[slot.path] = hax.named(array, parameters[slot.path].axes)
    trained = jax.tree_util.tree_map_with_path(
        lambda path, _: moved[path_of(path)], state.method.parameters, is_leaf=is_named
    )
    here = placed(trained, setup.layout, setup.layout.params)
    sums = sums_of(setup, state._replace(method=state.method._replace(parameters=here)))
    rewards = BETA * (theirs.log_probs(0.0, twin) - theirs.log_probs(0.0).detach())
    loss = -torch.nn.functional.logsigmoid(rewards[::2] - rewards[1::2]).mean()
    gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    assert rewards.abs().max() > 0.1
    assert sums.loss.array.sum() / PAIRS == pytest.approx(loss.item(), abs=1e-5)
    for slot in slots:
        found = parameters_of(sums.gradients)[slot.path].array.sum(0) / PAIRS
        for key, place in slot.tensors().items():
            value = slot.as_parameter(gradients.pop(key).numpy())
            np.testing.assert_allclose(found[place][real(value)], value, atol=1e-5, err_msg=key)
    assert not gradients


def real(value: np.ndarray) -> tuple[slice, ...]:
    """The part of a table that is no padding."""
    return tuple(slice(size) for size in value.shape)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--data.sources.pairs.packing=concat", "set it to pad"),
        ("--data.sources.pairs.loss_on=all", "pairs have their loss on completion"),
    ],
)
def test_what_a_run_cannot_compute_is_refused(twins, option, words):
    with pytest.raises(UserError, match=words):
        setup_of(twins[1], option)


def test_all_stages_have_a_reference_or_none(twins):
    with plugins_from(EXAMPLES), pytest.raises(UserError, match="only some stages have an objective with a reference"):
        setup_of(twins[1], "--adapter=null", "--plugins=[orpo]", "--stages=[{from: 3, objective: {type: orpo}}]")


def test_a_run_on_pairs_evaluates_pairs_and_other_text(twins, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "a" * (n % 3 + 1), "chosen": "yes" + "!" * (n % 4), "rejected": "no"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "other.txt").write_text("plain text " * 20)
    whole = config_of(twins[1]) | {"adapter": None, "checkpoint": {"every": 6, "keep_last": 2}}
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(whole))
    assert main(["train", "dpo.yaml"]) == 0
    run = tmp_path / "runs" / "tuned"
    again = killed(run, run.parent / "again", 6)
    assert main(["train", "dpo.yaml", "--name", "again"]) == 0
    assert_same_state(again, run, 12)
    logged = lines(tmp_path / "runs" / "tuned")
    first, *_, step = (line for line in logged if "loss" in line)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert step["loss"] < 0.5
    assert step["reward_accuracy"] == 1
    last = [line for line in logged if "eval_loss" in line][-1]
    assert last["eval_loss"] < 0.5
    assert "bits_per_byte" not in last
    assert last["eval_reward_accuracy"] == 1
    margin = last["eval_reward_chosen"] - last["eval_reward_rejected"]
    assert margin > 1
    assert last["eval_reward_margin"] == pytest.approx(margin, abs=1e-5)
    capsys.readouterr()
    assert main(["eval", "tuned", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    for name in ("eval_loss", "eval_reward_margin"):
        assert again[name] == pytest.approx(last[name], abs=1e-5)
    assert main(["eval", "tuned", "--json", "--data", "other.txt"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] > 1
