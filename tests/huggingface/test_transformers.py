"""Logits and gradients of every family equal those of transformers, float32."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.axes.layout import BATCH, is_named
from gregale.cli import main
from gregale.huggingface.config import family_that_has, lacking, read_config, text_part, written_config
from gregale.huggingface.families import FAMILIES, slots_of
from gregale.huggingface.folder import open_folder
from gregale.huggingface.weights import read_model
from gregale.model.llama import GemmaConfig, Llama
from tests.huggingface.hub import (
    CONFIGURATIONS,
    MODELS,
    PROMPT,
    SIZES,
    VOCABULARY,
    WITHOUT_TEXT,
    continued,
    made,
    of_family,
    values,
)
from tests.mesh.support import layout_of, one_device
from tests.packages import Package

torch, transformers = Package("torch"), Package("transformers")
ROWS, POSITIONS = 2, 24
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, POSITIONS + 1))


def abstract(folder, rows: int = VOCABULARY) -> Llama:
    Vocab = Axis("vocab", rows)
    return jax.eval_shape(lambda: Llama.init(folder.model, Vocab, jax.random.key(0)))


def batch() -> dict:
    axes = (Axis(BATCH, ROWS), Axis("position", POSITIONS))
    arrays = {
        "tokens": TOKENS[:, :-1],
        "targets": TOKENS[:, 1:],
        "loss_mask": np.ones((ROWS, POSITIONS), np.float32),
        "positions": np.tile(np.arange(POSITIONS), (ROWS, 1)),
    }
    return {name: hax.named(array, axes) for name, array in arrays.items()}


def assert_near(found: np.ndarray, wanted: np.ndarray, name: str) -> None:
    """Compare to 1e-5 of the tensor's own largest value."""
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0, err_msg=name)


@jax.jit
def logits_and_gradients(model: Llama):
    """Return logits and the gradients of their cross entropy, in one pass; `Llama.loss` has its own tests."""

    def loss(model):
        logits = model.logits(batch(), one_device()).rearrange((BATCH, "position", "vocab")).array
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), TOKENS[:, 1:, None], -1).mean(), logits

    gradients, logits = jax.grad(loss, has_aux=True)(model)
    return logits, gradients


def gradient_of(parameters: dict[str, Any], name: str) -> np.ndarray:
    """Return the gradient of a tensor of the files; transformers holds those of a layer's experts in two parameters."""
    for ours, theirs in (("block_sparse_moe", "mlp"), ("router.gate", "gate"), ("shared_mlp", "shared_experts")):
        name = name.replace(ours, theirs)
    if (found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)) is None:
        return parameters[name].grad.numpy()
    stack, expert, kind = found.groups()
    if kind in ("down_proj", "w2"):
        return parameters[f"{stack}.down_proj"].grad[int(expert)].numpy()
    return np.split(parameters[f"{stack}.gate_up_proj"].grad[int(expert)].numpy(), 2)[kind in ("up_proj", "w3")]


def assert_logits_and_gradients(theirs: Any, folder: Path) -> None:
    found = open_folder(folder)
    model = read_model(found, abstract(found), layout_of())
    logits, gradients = logits_and_gradients(model)
    output = theirs(torch.tensor(TOKENS[:, :-1])).logits
    assert_near(logits, output.detach().numpy(), "logits")
    targets = torch.tensor(TOKENS[:, 1:])
    torch.nn.functional.cross_entropy(output.reshape(-1, VOCABULARY), targets.reshape(-1)).backward()
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.array
        for path, leaf in jax.tree_util.tree_flatten_with_path(gradients, is_leaf=is_named)[0]
    }
    parameters = dict(theirs.named_parameters())
    for slot in (slot for slot in slots_of(model, found.family) if not slot.is_buffer):
        for hub, place in slot.tensors().items():
            wanted = slot.as_parameter(gradient_of(parameters, hub))
            assert_near(np.asarray(leaves[slot.path][place]), wanted, hub)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in CONFIGURATIONS])
def test_a_model_is_that_of_transformers(name, tmp_path, capsys):
    """Its logits and gradients, what `import` and `export` write, and a greedy text."""
    hub, mine, out = (tmp_path / each for each in ("hub", "mine", "out"))
    theirs = made(name, hub, "20KB")
    assert_logits_and_gradients(theirs, hub)
    if name in WITHOUT_TEXT:
        return
    assert main(["import", str(hub), str(mine)]) == 0
    assert main(["export", str(mine), str(out)]) == 0
    assert values(out) == values(hub)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (hub, out))
    assert {key for key in before if after[key] != before[key]} <= {"use_bidirectional_attention"}
    capsys.readouterr()
    assert main(["sample", str(mine), PROMPT, "--tokens", "12", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"{PROMPT}{continued(out)}\n"


def test_shards_of_experts_are_parts_of_the_same_tensors(tmp_path):
    made("dots1", tmp_path)
    folder = open_folder(tmp_path)
    layouts, model = (layout_of(), layout_of(data=2, model=2)), abstract(folder, VOCABULARY + 1)
    one, split = (read_model(folder, model, layout) for layout in layouts)
    jax.tree.map(np.testing.assert_array_equal, one, split)
    stacks = split.blocks.parts[1].mlp
    assert stacks.down.array.sharding.shard_shape(stacks.down.array.shape) == (2, 8, 8, 16)
    assert stacks.bias.value.array.sharding.is_fully_replicated
    np.testing.assert_array_equal(stacks.load.value.array, np.ones((2, 8)))


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_that_transformers_reads_back_is_the_same(name):
    model_type, settings = MODELS[name]
    first = transformers.AutoConfig.for_model(model_type, **{**SIZES, **settings}).to_dict()
    family, config = read_config(first, "config.json")
    assert written_config(config, family, VOCABULARY, first) == first | {"architectures": [family.architecture]}
    config = replace(config, head_size=config.HeadSize.size)
    for before in ({"rope_parameters": {}}, {}):  # and as older versions say it
        written = written_config(config, family, VOCABULARY, before)
        read = transformers.AutoConfig.for_model(**written)
        assert read_config(read.to_dict(), "config.json") == (family, config)
        assert read_config(written, "config.json") == (family, config)
        assert family_that_has(config, {"model_type": model_type}) == family


def test_the_text_of_a_gemma_3_with_images_has_the_sizes_that_transformers_derives():
    """Published files leave most sizes of `text_config` out."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    saved = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": {}}
    theirs = transformers.AutoConfig.for_model(**saved).text_config.to_dict()
    found = text_part(saved)
    assert found["eos_token_id"] == [1, 106]
    assert read_config(found, "") == read_config(theirs, "")
    assert read_config(found, "")[1].vocabulary == 262208
    assert text_part(SIZES) is SIZES


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
def test_a_gemma_without_windows_goes_out_as_one_that_transformers_computes(name):
    family = FAMILIES[name]
    config = GemmaConfig(layers=1, hidden=8, heads=1, kv_heads=1, head_size=8, mlp=8, tied_head=True, **family.block)
    written = written_config(replace(config, vocabulary=9), family, 9, {"pad_token_id": None, "rope_parameters": {}})
    read = transformers.AutoConfig.for_model(**written)
    model = transformers.AutoModelForCausalLM.from_config(read, attn_implementation="eager")
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 9)
    assert read_config(written, "config.json")[1].sliding_window is None


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.any_head_size])
def test_heads_that_do_not_divide_the_width_go_out_where_transformers_takes_them(name):
    family = FAMILIES[name]
    config = of_family(family, layers=1, hidden=10, heads=3, head_size=8, mlp=8)
    written = written_config(replace(config, vocabulary=9), family, 9, {"pad_token_id": None})
    if lacking(config, family):
        with pytest.raises(Exception, match="not a multiple of the number of attention heads"):
            transformers.AutoConfig.for_model(**written)
    else:
        transformers.AutoConfig.for_model(**written)
