"""DPO against plain torch, on one device and on a mesh; runs that train and evaluate on pairs."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest
import yaml

from gregale.axes.mesh import make_mesh
from gregale.cli import main
from gregale.data.tokenizers import load_tokenizer
from gregale.errors import UserError
from gregale.huggingface.tensor_names import parameters_of
from gregale.programs.runtime.adapters import family_of, slots_of_adapters
from gregale.programs.runtime.setup import Setup, set_up
from gregale.programs.runtime.trained_model import Base, find_run
from gregale.programs.train.resume import started_state
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.huggingface.hub import VOCABULARY, made
from tests.mesh.support import placed
from tests.packages import Package

torch, safetensors = Package("torch"), Package("safetensors.torch")
PAIRS, POSITIONS, BETA = 4, 16, 0.3
RANK, ALPHA = 4, 8.0
SOURCE = {"type": "chat", "files": ["pairs.jsonl"], "form": "pairs", "packing": "pad"}


@cache
def arrays() -> dict[str, np.ndarray]:
    """Pairs with prompts and answers of several lengths, and padding."""
    generator, rows = np.random.default_rng(0), 2 * PAIRS
    tokens = generator.integers(0, VOCABULARY, (rows, POSITIONS + 1), dtype=np.int32)
    tokens[1::2, :5] = tokens[::2, :5]
    places, ends = np.arange(POSITIONS), generator.integers(6, POSITIONS + 1, (rows, 1))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": ((places >= 4) & (places < ends)).astype(np.float32),
        "positions": np.where(places < ends, places, places - ends).astype(np.int32),
        "segment_ids": (places >= ends).astype(np.int32),
    }


def setup_of(imported: Path, mesh: tuple[int, int, int], microbatches: int, *options: str) -> Setup:
    config, (replica, data, model) = yaml.safe_load((imported / "config.yaml").read_text()), mesh
    keys: dict[str, Any] = {
        "name": "preferences",
        "steps": 4,
        "start_from": str(imported),
        "cpu_devices": 8,
        "model": config["model"] | {"row_multiple": 8},
        "mesh": {"replica": replica, "data": data, "model": model},
        "adapter": {"rank": RANK, "alpha": ALPHA, "start_from": str(imported.parent / "peft")},
        "objective": {"type": "dpo", "beta": BETA},
        "compute": {"dtype": "float32", "loss_block": 8},
        "batch": {"size": 2 * PAIRS, "sequence_length": POSITIONS, "microbatches": microbatches},
        "data": {"sources": {"pairs": SOURCE}, "tokenizer": config["data"]["tokenizer"]},
    }
    loaded = load(TrainConfig, keys, list(options))
    devices = jax.devices()[: loaded.mesh.device_count]
    return set_up(loaded, load_tokenizer(imported).vocabulary_size, make_mesh(loaded.mesh, devices))


class Twin:
    """A model of torch with plain LoRA, whose factors are both not zero."""

    def __init__(self, model: Any):
        self.model, self.scale, self.factors = model.requires_grad_(False), ALPHA / RANK, {}
        torch.manual_seed(2)
        for name, layer in model.named_modules():
            if name.endswith(("q_proj", "v_proj")):
                a, b = torch.randn(RANK, layer.in_features) / 4, torch.randn(layer.out_features, RANK) / 4
                self.factors |= {f"base_model.model.{name}.lora_{x}.weight": each for x, each in (("A", a), ("B", b))}
                layer.register_forward_hook(lambda _, given, out, a=a, b=b: out + self.scale * given[0] @ a.T @ b.T)
        for factor in self.factors.values():
            factor.requires_grad_()


def of_torch(twin: Twin) -> tuple[float, np.ndarray, dict[str, np.ndarray]]:
    """The loss summed over pairs, the rewards [row], and the gradients of the mean loss, as the paper has them."""
    batch = {name: torch.tensor(array) for name, array in arrays().items()}

    def log_probs():
        logs = torch.log_softmax(twin.model(batch["tokens"].long()).logits, -1)
        at_target = torch.gather(logs, 2, batch["targets"].long()[..., None])[..., 0]
        return (at_target * batch["loss_mask"]).sum(1)

    scale, twin.scale = twin.scale, 0.0
    reference = log_probs().detach()
    twin.scale = scale
    rewards = BETA * (log_probs() - reference)
    loss = -torch.nn.functional.logsigmoid(rewards[::2] - rewards[1::2]).sum()
    gradients = torch.autograd.grad(loss / PAIRS, list(twin.factors.values()))
    return (
        loss.item(),
        rewards.detach().numpy(),
        {key: x.numpy() for key, x in zip(twin.factors, gradients, strict=True)},
    )


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


def summed(setup: Setup, state: Any):
    """What a step sums over its microbatches, in one program: loss, weight, metrics, and gradients over the weight."""
    batch = {name: hax.named(array, setup.batch_axes) for name, array in arrays().items()}
    batch = placed(batch, setup.layout, setup.layout.compute)

    @jax.jit
    def run(state, batch):
        method = setup.psdp.holding(state.frozen)
        return method.sums(method.ready(state.method), batch)

    sums = jax.device_get(run(state, batch))
    loss, weight, *named = (each.array.sum() for each in (sums.loss, sums.weight, *sums.named.values()))
    gradients = {path: leaf.array.sum(0) / weight for path, leaf in parameters_of(sums.gradients).items()}
    return loss, weight, dict(zip(sums.named, named, strict=True)), gradients


@pytest.mark.parametrize(("mesh", "microbatches"), [((1, 1, 1), 1), ((1, 1, 1), 2), ((2, 2, 2), 1)])
def test_loss_rewards_and_gradients_equal_those_of_torch(twins, mesh, microbatches):
    theirs, imported = twins
    setup = setup_of(imported, mesh, microbatches)
    state = started_state(setup, load_tokenizer(imported), Base.of(setup.config))
    loss, weight, named, gradients = summed(setup, state)
    expected, rewards, wanted = of_torch(theirs)
    assert weight == PAIRS
    np.testing.assert_allclose(loss / PAIRS, expected / PAIRS, atol=1e-5)
    margins = rewards[::2] - rewards[1::2]
    assert np.abs(margins).max() > 0.1
    figures = (margins, margins > 0, rewards[::2], rewards[1::2])
    names = [f"reward_{name}" for name in ("margin", "accuracy", "chosen", "rejected")]
    np.testing.assert_allclose([named[name] / PAIRS for name in names], [each.mean() for each in figures], atol=1e-5)
    for slot in slots_of_adapters(setup, family_of(setup, find_run(str(imported)))):
        for key, place in slot.tensors().items():
            value = slot.as_parameter(wanted.pop(key))
            assert np.abs(value).max() > 1e-3
            np.testing.assert_allclose(gradients[slot.path][place], value, atol=1e-5, err_msg=key)
    assert not wanted


def test_the_first_loss_is_ln_2_a_pair(twins):
    setup = setup_of(twins[1], (2, 2, 2), 1, "--adapter.start_from=null")
    state = started_state(setup, load_tokenizer(twins[1]), Base.of(setup.config))
    loss, weight, named, gradients = summed(setup, state)
    assert loss / weight == pytest.approx(math.log(2), abs=1e-6)
    assert named["reward_margin"] == pytest.approx(0, abs=1e-6)
    assert max(np.abs(each).max() for each in gradients.values()) > 1e-3


def test_what_a_run_cannot_compute_is_refused(twins):
    def refusal(*options: str, mesh: tuple[int, int, int] = (1, 1, 1), microbatches: int = 1) -> str:
        with pytest.raises(UserError) as error:
            setup_of(twins[1], mesh, microbatches, *options)
        return str(error.value)

    assert "Set adapter.type to lora" in refusal("--adapter=null")
    assert "has pairs, but objective.type is next_token" in refusal("--objective={type: next_token}")
    assert "has no pairs" in refusal("--data.sources.pairs.form=prompt")
    assert "set it to pad" in refusal("--data.sources.pairs.packing=concat")
    assert "pairs have their loss on completion" in refusal("--data.sources.pairs.loss_on=all")
    assert "evaluation.by_position is for the loss of the next token" in refusal("--evaluation.by_position=true")
    odd = refusal(mesh=(2, 2, 2), microbatches=2)
    assert "8: each of 2 microbatches has 1 rows on a device" in odd
    assert "batch.size 16 would work" in odd


def test_a_run_on_pairs_evaluates_pairs_and_other_text(twins, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "a" * (n % 3 + 1), "chosen": "yes" + "!" * (n % 4), "rejected": "no"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "other.txt").write_text("plain text " * 20)
    keys = yaml.safe_load((twins[1] / "config.yaml").read_text())
    config = {
        "name": "tuned",
        "steps": 12,
        "start_from": str(twins[1]),
        "model": keys["model"] | {"row_multiple": 8},
        "mesh": {"replica": 2, "data": 2, "model": 2},
        "cpu_devices": 8,
        "adapter": {"rank": 4},
        "objective": {"type": "dpo"},
        "compute": {"dtype": "float32"},
        "batch": {"size": 8, "sequence_length": 32},
        "optimizer": {"learning_rate": 0.01, "schedule": {"type": "constant", "warmup": 0}},
        "data": {"sources": {"pairs": SOURCE}, "tokenizer": keys["data"]["tokenizer"], "held_out": 0.2, "workers": 1},
        "evaluation": {"every": 6},
    }
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "dpo.yaml"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "runs" / "tuned" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[-1]["loss"] < 0.5
    assert steps[-1]["reward_accuracy"] == 1
    assert steps[-1]["reward_margin"] == pytest.approx(steps[-1]["reward_chosen"] - steps[-1]["reward_rejected"])
    (*_, last) = (line for line in lines if "eval_loss" in line)
    assert last["eval_loss"] < 0.5
    assert "bits_per_byte" not in last
    capsys.readouterr()
    assert main(["eval", "tuned", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(last["eval_loss"], abs=1e-5)
    assert main(["eval", "tuned", "--json", "--data", "other.txt"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] > 1
