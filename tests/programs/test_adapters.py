"""Runs with adapters: PEFT as the oracle, checkpoints without frozen weights, folders of PEFT in and out."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest
import yaml
from haliax import NamedArray

from gregale.axes.layout import BATCH, POSITION
from gregale.axes.parameters import with_arrays
from gregale.cli import main
from gregale.data.tokenizers import load_tokenizer
from gregale.errors import UserError
from gregale.huggingface.families import parameters_of, slots_of
from gregale.huggingface.folder import ADAPTER, read_json
from gregale.huggingface.peft import FREE, adapter_slots, check_settings
from gregale.model.config import LoraConfig
from gregale.model.llama import Llama
from gregale.model.losses import losses_of
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.trained_model import FrozenSource, base_name, family_of, open_trained, weights_of
from gregale.programs.train.resume import started_state
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.runs.run_directory import RunDirectory
from gregale.training.state import TrainState
from tests.huggingface.hub import VOCABULARY, made
from tests.mesh.support import placed
from tests.packages import Package
from tests.programs.tiny import CONFIG, assert_same_state, checkpoint_steps, killed, saved_state, write_config

torch, transformers, peft = Package("torch"), Package("transformers"), Package("peft")

STEPS, ROWS, POSITIONS = 20, 8, 16
RATE, DECAY = 1e-2, 0.1
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
PROJECTIONS |= {name: f"{name}_proj" for name in ("gate", "up", "down")}
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
    """Train the adapters of a PEFT model, or all of another one, in plain torch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors = {"params": [each for each in trained if each.ndim == 1], "weight_decay": 0.0}
    groups = [{"params": [each for each in trained if each.ndim > 1]}, *([vectors] if vectors["params"] else [])]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    found = []
    for step in range(STEPS):
        batch = {name: torch.tensor(array) for name, array in batch_of(step).items()}
        logits = model(batch["tokens"].long()).logits.transpose(1, 2)
        each = torch.nn.functional.cross_entropy(logits, batch["targets"].long(), reduction="none")
        loss = (each * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def setup_of(imported: Path, adapter: dict[str, Any] | None) -> Setup:
    own = yaml.safe_load((imported / "config.yaml").read_text())
    schedule = {"type": "constant", "warmup": 0}
    keys = CONFIG | {
        "start_from": str(imported),
        "cpu_devices": 8,
        "model": own["model"] | {"row_multiple": 8},
        "adapter": adapter,
        "batch": {"size": ROWS, "sequence_length": POSITIONS, "microbatches": 2},
        "optimizer": {"learning_rate": RATE, "weight_decay": DECAY, "clip_norm": None, "schedule": schedule},
    }
    return set_up(load(TrainConfig, keys), load_tokenizer(imported).vocabulary_size)


def batches(setup: Setup):
    for step in range(STEPS):
        named = {name: of_batch(array) for name, array in batch_of(step).items()}
        yield placed(named, setup.layout, setup.layout.compute)


def of_batch(array: np.ndarray) -> NamedArray:
    return hax.named(array, (BATCH, POSITION))


# The second has all targets; `test_the_scale_of_an_adapter` has both scalings.
@pytest.mark.parametrize("name", [pytest.param("llama2", marks=pytest.mark.soak), "qwen2"])
def test_twenty_steps_equal_those_of_torch_with_peft(name, tmp_path):
    theirs = of_peft(made(name, tmp_path / "hub"), name)
    theirs.save_pretrained(tmp_path / "peft")
    assert main(["import", str(tmp_path / "hub"), str(tmp_path / "mine")]) == 0
    adapter = {"rank": 4, "alpha": 8.0, "start_from": str(tmp_path / "peft")}
    targets, scaling = TWINS[name]
    setup = setup_of(tmp_path / "mine", adapter | {"scaling": scaling, "targets": list(targets)})
    base = FrozenSource.of(setup.config.start_from)
    state = started_state(setup, load_tokenizer(tmp_path / "mine"), base)
    assert_equal_loss(setup, weights_of(base, setup, setup.base), state)
    found, state = twenty_steps(setup, state)
    np.testing.assert_allclose(found, torch_losses(theirs), atol=5e-5, rtol=0)
    trained = {key.replace(".default", ""): value for key, value in theirs.named_parameters() if "lora" in key}
    leaves = parameters_of(state.method.parameters)
    slots = adapter_slots(slots_of(setup.base, family_of(setup, base.origin)), setup.model)
    assert len(slots) == 2 * len(targets)
    for slot in slots:
        for key, place in slot.tensors().items():
            wanted = slot.as_parameter(trained.pop(key).detach().numpy())
            np.testing.assert_allclose(leaves[slot.path].array[place], wanted, atol=1e-5, rtol=0, err_msg=key)
    assert not trained


def twenty_steps(setup: Setup, state: TrainState) -> tuple[list[float], TrainState]:
    take, found = setup.stepper(), []
    for step, batch in enumerate(batches(setup), 1):
        state, report = take(state, batch, step)
        found.append(float(report.metrics.loss))
    return found, state


def test_twenty_steps_of_a_whole_model_equal_those_of_torch(tmp_path):
    theirs = made("qwen2", tmp_path / "hub")
    assert main(["import", str(tmp_path / "hub"), str(tmp_path / "mine")]) == 0
    setup = setup_of(tmp_path / "mine", None)
    state = started_state(setup, load_tokenizer(tmp_path / "mine"), None)
    found, state = twenty_steps(setup, state)
    np.testing.assert_allclose(found, torch_losses(theirs), atol=5e-5, rtol=0)
    trained, leaves = dict(theirs.named_parameters()), parameters_of(state.method.parameters)
    for slot in slots_of(setup.base, family_of(setup, RunDirectory(tmp_path / "mine"))):
        for key, place in slot.tensors().items():
            value = trained[key].detach().numpy()
            added = [(0, -value.shape[0] % 8), *[(0, 0)] * (value.ndim - 1)]  # rows that fill the vocabulary up
            wanted = slot.as_parameter(np.pad(value, added, constant_values=np.nan))
            found = np.where(np.isnan(wanted), np.nan, leaves[slot.path].array[place])
            np.testing.assert_allclose(found, wanted, atol=5e-5, rtol=0, err_msg=key)


def assert_equal_loss(setup: Setup, plain: Any, state: TrainState) -> None:
    """Before the first step, the loss is that of the base to the last bit."""
    batch, run = next(batches(setup)), setup.evaluation_execution()
    adapted = with_arrays(jax.jit(setup.method.eval_model)(state.method), state.frozen)

    @jax.jit
    def loss(model):
        return losses_of(model.loss(batch, run)).loss

    assert float(loss(plain)) == float(loss(adapted)) > 0


@pytest.fixture(scope="module")
def tuned(inputs) -> Path:
    """A run of four steps with adapters on an imported model, evaluated and saved in the middle."""
    made("qwen2", inputs / "hub")
    return trained_run(inputs, "tuned", "hub", "mine", {"rank": 4, "targets": ["query", "down"]})


def trained_run(inputs: Path, name: str, hub: str, imported: str, adapter: dict[str, Any], **changes: Any) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(inputs)
        assert main(["import", hub, imported]) == 0
        config = yaml.safe_load((inputs / imported / "config.yaml").read_text())
        write_config(
            inputs,
            f"{name}.yaml",
            steps=4,
            start_from=imported,
            model=config["model"] | {"row_multiple": 8},
            data__tokenizer=config["data"]["tokenizer"],
            adapter=adapter,
            checkpoint={"every": 2},
            optimizer={"type": "adamw", "learning_rate": 0.01},
            **changes,
        )
        assert main(["train", f"{name}.yaml", "--name", name]) == 0
    return inputs / "runs" / name


def test_a_checkpoint_has_the_adapters_and_names_the_frozen_weights(tuned):
    saved = saved_state(tuned, 4)
    factors = 2 * 4 * ((32 + 32) + (48 + 32))  # of queries and of `down`, with rank 4 in 2 layers
    assert sum(array.size for name, array in saved.items() if array.ndim) == 3 * factors  # AdamW's moments too
    assert all("lora" in name for name, array in saved.items() if array.ndim)
    manifest = next(tuned.glob("checkpoints/step-00000004/*/metadata.json"))
    base = json.loads(manifest.read_text())["base"]
    assert (Path(base["origin"]).name, base["step"], len(base["digest"])) == ("mine", 0, 32)


def test_a_resumed_run_is_equal_to_the_last_bit(tuned, inputs, gregale):
    again = killed(tuned, inputs / "runs" / "again", 2)
    assert checkpoint_steps(again) == [2]
    assert gregale("train", "tuned.yaml", "--name", "again") == 0
    assert_same_state(again, tuned, 4)


def test_other_frozen_weights_are_refused(tuned, inputs, refused):
    shutil.copytree(inputs / "mine", inputs / "other")
    weights = inputs / "other" / "huggingface" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    line = refused("train", "tuned.yaml", "--name", "tuned", "--start_from", "other", "--steps", "6")
    assert "are not those that this run began with" in line


def test_exports_compute_what_the_run_computes(tuned, inputs, gregale):
    assert gregale("export", "tuned", "merged") == 0
    assert gregale("export", "tuned", "adapters", "--adapter") == 0
    tokens = torch.tensor(batch_of(0)["tokens"].astype(np.int64))
    base = transformers.AutoModelForCausalLM.from_pretrained(inputs / "hub")
    before = base(tokens).logits.detach().numpy()
    merged = transformers.AutoModelForCausalLM.from_pretrained(inputs / "merged")(tokens).logits.detach().numpy()
    beside = peft.AutoPeftModelForCausalLM.from_pretrained(inputs / "adapters")(tokens).logits.detach().numpy()
    np.testing.assert_allclose(merged, beside, atol=1e-4)
    assert np.abs(merged - before).max() > 1e-2
    np.testing.assert_allclose(logits_of("tuned"), beside, atol=1e-4)


def test_a_base_that_peft_cannot_open_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = FrozenSource(RunDirectory(tmp_path / "trained"), 4, "digest")
    for name in ("merged", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "merged" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"`gregale export \S+/trained FOLDER --step 4`.*`--base FOLDER"):
        base_name(trained, None)
    for wrong in ("empty", "./modle", "/no/such"):
        with pytest.raises(UserError, match=rf"base: {wrong.removeprefix('./')} is no model of transformers"):
            base_name(trained, wrong)
    assert base_name(trained, "merged") == str(tmp_path / "merged")
    assert base_name(trained, "org/name") == "org/name"


def logits_of(name: str) -> np.ndarray:
    trained = open_trained(name, None, 1)
    named = {key: of_batch(array) for key, array in batch_of(0).items()}
    assert isinstance(trained.model, Llama)
    run = trained.setup.evaluation_execution()
    found = jax.jit(lambda model: model.logits(named, run).rearrange(("batch", "position", "vocab")))(trained.model)
    return np.asarray(found.array)[..., :VOCABULARY]


def test_a_run_beside_weights_in_four_bits_resumes_and_exports_what_it_computes(inputs, gregale, refused):
    made("qwen2", inputs / "wide_hub", hidden_size=128, intermediate_size=128)
    adapter = {"rank": 4, "targets": ["query", "down"], "base": "nf4"}
    run = trained_run(inputs, "bits", "wide_hub", "wide", adapter, compute__remat="full")
    again = killed(run, inputs / "runs" / "bits_again", 2)
    assert gregale("train", "bits.yaml", "--name", "bits_again") == 0
    assert_same_state(again, run, 4)
    assert "adapter.base" in refused("train", "bits.yaml", "--name", "bits", "--steps", "6", "--adapter.base", "int8")
    assert gregale("export", "bits", "bits_merged") == 0
    assert gregale("sample", "bits", "the ", "--tokens", "4") == 0
    tokens = torch.tensor(batch_of(0)["tokens"].astype(np.int64))
    merged, base = (
        transformers.AutoModelForCausalLM.from_pretrained(inputs / folder)(tokens).logits.detach().numpy()
        for folder in ("bits_merged", "wide_hub")
    )
    found = logits_of("bits")
    np.testing.assert_allclose(merged, found, atol=2e-4)
    assert np.abs(base - found).max() > 0.1


def test_evaluation_and_samples_are_of_the_adapted_model(tuned, gregale, evaluated, capsys):
    lines = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    last = [line["eval_loss"] for line in lines if "eval_loss" in line][-1]
    assert evaluated("tuned")["eval_loss"] == pytest.approx(last, abs=1e-5)
    assert gregale("sample", "tuned", "the ", "--tokens", "4") == 0


def started(*options: str) -> TrainState:
    """The state before the first step of a run with other options."""
    config = load(TrainConfig, "tuned.yaml", options)
    setup = set_up(config, load_tokenizer(Path("mine")).vocabulary_size)
    base = None if config.adapter is None else FrozenSource.of(config.start_from)
    return jax.device_get(started_state(setup, load_tokenizer(Path("mine")), base))


def test_a_run_continues_adapters_or_merges_them_first(tuned, inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    saved = {name.partition("parameters/")[2].replace("/", "."): array for name, array in saved_state(tuned, 4).items()}
    before = parameters_of(started().frozen)
    for state in (started("--adapter.start_from=tuned"), started("--adapter.start_from=adapters")):
        for path, leaf in parameters_of(state.method.parameters).items():
            np.testing.assert_array_equal(leaf.array, saved[path])
    merged = parameters_of(started("--start_from=tuned").frozen)
    whole = parameters_of(started("--start_from=tuned", "--adapter=null").method.parameters)
    a, b = (saved[f"blocks.attention.query.{factor}.weight"] for factor in ("lora_a", "lora_b"))
    changed = np.einsum("ler,lrhd->lehd", a, b) * 32 / 4
    for path, leaf in before.items():
        expected = leaf.array + changed if path == "blocks.attention.query.weight" else leaf.array
        if path != "blocks.mlp.down.weight":
            np.testing.assert_allclose(merged[path].array, expected, atol=1e-6, err_msg=path)
        np.testing.assert_array_equal(merged[path].array, whole[path].array, err_msg=path)


def test_each_key_of_pefts_configuration_has_a_rule():
    """A new version of PEFT may have another key, which is refused where it is not off."""
    keys = [each.name for each in dataclasses.fields(peft.LoraConfig)]
    ours, saved = LoraConfig(rank=8, alpha=8), peft.LoraConfig().to_dict()
    saved = json.loads(json.dumps({**saved, "peft_type": "LORA"}, default=list))
    check_settings(saved, ours, "x")
    check_settings({"peft_type": "LORA", "of_tomorrow": False}, ours, "x")
    others = [("init_lora_weights", init) for init in ("corda", "loftq", "lora_ga", "newer")] + [("of_tomorrow", "x")]
    for name, value in [*((name, [7]) for name in keys if name not in FREE), *others]:
        with pytest.raises(UserError, match=re.escape(f"{name} is {value!r} in x")):
            check_settings({**saved, name: value}, ours, "x")


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal", "mica", "pissa", "pissa_niter_4", "olora"])
def test_adapters_whose_start_changes_the_base_are_refused(init, tmp_path):
    """What a new adapter of PEFT does to a weight of its base decides."""
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8))
    before = layer[0].weight.detach().clone()
    model = peft.get_peft_model(layer, peft.LoraConfig(r=2, init_lora_weights=init, target_modules=["0"]))
    model.save_pretrained(tmp_path / "first")
    if torch.equal(model.base_model.model[0].base_layer.weight, before):
        check_settings(read_json(tmp_path / "first" / ADAPTER), LoraConfig(rank=2, alpha=8), "x")
        return
    with pytest.raises(UserError, match=f"init_lora_weights is '{init}' in x. PEFT changes the base"):
        check_settings(read_json(tmp_path / "first" / ADAPTER), LoraConfig(rank=2, alpha=8), "x")
    model.peft_config["default"].init_lora_weights = True  # as the message advises
    model.save_pretrained(tmp_path / "first")
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    check_settings(read_json(tmp_path / "plain" / ADAPTER), LoraConfig(rank=4, alpha=16), "x")


def test_adapters_that_do_not_fit_are_refused(tuned, refused):
    train = ("train", "tuned.yaml", "--name", "unfit")
    assert "has other adapters" in refused(*train, "--adapter.start_from", "tuned", "--adapter.rank", "8")
    assert "r is 4 in" in refused(*train, "--adapter.start_from", "adapters", "--adapter.rank", "8")
    assert "beside other weights" in refused(*train, "--adapter.start_from", "tuned", "--start_from", "tuned")
    assert "has no adapters" in refused("export", "mine", "folder", "--adapter")
