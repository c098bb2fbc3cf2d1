"""Models with experts: import, export, texts and further training, with transformers on both ends."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gregale.errors import UserError
from gregale.huggingface.config import family_that_has, lacking
from gregale.huggingface.families import FAMILIES, parameters_of
from gregale.huggingface.folder import open_folder
from gregale.model.config import BalanceConfig, ExpertsConfig
from gregale.model.llama import LlamaConfig
from gregale.programs.runtime.trained_model import open_trained
from tests.huggingface.hub import continued, made
from tests.packages import Package
from tests.programs.tiny import write_further

torch, transformers = Package("torch"), Package("transformers")


def values(folder: Path) -> dict[str, bytes]:
    return {name: np.array(tensor.mapped()).tobytes() for name, tensor in open_folder(folder).tensors.items()}


def test_a_run_from_it_trains_its_bias_and_is_exported_with_it(gregale, inputs):
    """On a mesh, with dense layers; all but the bias is bfloat16 in the files."""
    made("dots1", inputs / "hub")
    assert gregale("import", inputs / "hub", inputs / "mine") == 0
    write_further(inputs, inputs / "mine")
    assert gregale("train", "on.yaml", "--name", "on", "--start_from", "mine") == 0
    assert gregale("export", "on", inputs / "out", "--dtype", "bfloat16", "--devices", "2") == 0
    found, name = open_folder(inputs / "out").tensors, "model.layers.2.mlp.gate.e_score_correction_bias"
    assert {tensor.dtype.name for key, tensor in found.items() if "bias" not in key} == {"bfloat16"}
    trained = parameters_of(open_trained("on", None, 1).model)["blocks.parts.1.mlp.bias.value"].array[1]
    np.testing.assert_array_equal(found[name].mapped(), trained)
    moved = trained - open_folder(inputs / "hub").tensors[name].mapped()
    assert 0 < np.abs(moved).max() < 0.5, "it starts from the imported bias"
    assert continued(inputs / "out")


def packed(folder: Path) -> dict[str, bytes]:
    """Put the experts of a gpt-oss in MXFP4, random ones; return its tensors as transformers decodes them."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = {}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        found |= tensors
        for name in [name for name in tensors if name.endswith("_proj")]:
            experts, inputs, outputs = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(112, 126, blocks.shape[:-1], dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            found[name] = convert_moe_packed_tensors(blocks, scales)
        save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return {name: each.contiguous().view(torch.uint8).numpy().tobytes() for name, each in found.items()}


def test_weights_in_mxfp4_are_decoded_by_an_import(gregale, tmp_path):
    made("gpt_oss", tmp_path / "hub", "60KB", "bfloat16")
    expected = packed(tmp_path / "hub")
    assert gregale("import", tmp_path / "hub", tmp_path / "mine") == 0
    assert gregale("export", tmp_path / "mine", tmp_path / "out") == 0
    assert values(tmp_path / "out") == expected
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert continued(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, name: tensors[f"{name}_scales"].fill_(255), "down_proj holds NaN or infinity"),
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "lacks .*down_proj and also has .*down_proj_blocks"),
        (lambda tensors, name: tensors[f"{name}_scales"].resize_(4, 32, 1), r"in MXFP4 they are \[experts, outputs"),
    ],
)
def test_damaged_weights_in_mxfp4_are_refused(refused, tmp_path, change, words):
    from safetensors.torch import load_file, save_file

    made("gpt_oss", tmp_path / "hub", dtype="bfloat16")
    packed(tmp_path / "hub")
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    change(tensors, "model.layers.1.mlp.experts.down_proj")
    save_file(tensors, tmp_path / "hub" / "model.safetensors")
    assert re.search(words, refused("import", tmp_path / "hub", tmp_path / "mine"))
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"balance": BalanceConfig(bias=True)}, "mixtral not model.experts.balance.bias True"),
        ({"score": "sigmoid"}, "mixtral not model.experts.score sigmoid"),
        ({"groups": 4, "active_groups": 2}, "mixtral not model.experts.groups 4, model.experts.active_groups 2"),
        ({"scale": 2.5}, "mixtral not model.experts.scale 2.5; qwen3_moe not model.qk_norm False, model.experts.scale"),
        ({"shared": 100}, "mixtral not model.experts.shared 100; qwen2_moe not model.experts.shared_gate False"),
    ],
)
def test_experts_that_no_family_has_are_refused_in_a_line(changes, words):
    with pytest.raises(UserError, match=words) as error:
        family_that_has(LlamaConfig(experts=ExpertsConfig(**changes)))
    assert "\n" not in str(error.value)
    assert "llama" not in str(error.value)


def test_experts_go_out_as_a_family_that_has_them():
    config = LlamaConfig(experts=ExpertsConfig())
    assert family_that_has(config).model_type == "mixtral"
    qwen3 = replace(config, qk_norm=True, layers=4, dense_layers=2)
    assert family_that_has(qwen3).model_type == "qwen3_moe"
    assert lacking(config, FAMILIES["llama"]) == ["model.experts"]
    assert lacking(LlamaConfig(), FAMILIES["mixtral"]) == ["model.experts null"]
    odd = replace(config, experts=ExpertsConfig(shared=100))
    assert lacking(odd, FAMILIES["solar_open"])[0] == "model.experts.shared 100"
