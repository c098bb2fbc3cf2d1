"""Families of plugins, and folders that have more than one model: import, text and export."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from gregale.cli import main
from gregale.data.tokenizers import BytesTokenizer
from gregale.huggingface.families import FAMILIES, Family, register_family
from gregale.huggingface.tokenizer import write_tokenizer
from gregale.runs.run_directory import RunDirectory
from tests.docs.pages import ROOT, blocks
from tests.huggingface.hub import CONTEXT, PROMPT, SIZES, continued, made, values
from tests.packages import Package
from tests.plugins import plugins_from

torch, transformers = Package("torch"), Package("transformers")
SAMPLE = (PROMPT, "--tokens", "12", "--temperature", "0")


def test_a_family_of_a_plugin_is_imported_sampled_and_exported(tmp_path, monkeypatch, capsys):
    """That of the page is a llama with other names, which transformers continues with the same text."""
    made("llama3", tmp_path / "llama")
    hub = tmp_path / "hub"
    hub.mkdir()
    for path in (tmp_path / "llama").iterdir():
        (hub / path.name).write_bytes(path.read_bytes())
    tensors = load_file(hub / "model.safetensors")
    save_file({name.replace("self_attn", "attn"): each for name, each in tensors.items()}, hub / "model.safetensors")
    config = json.loads((hub / "config.json").read_text())
    own = {"model_type": "breeze", "qkv_bias": False, "architectures": ["BreezeForCausalLM"]}
    del config["attention_bias"]
    (hub / "config.json").write_text(json.dumps(config | own))
    (tmp_path / "breeze.py").write_text(blocks((ROOT / "docs/extending/family.md").read_text(), "python")[0])
    monkeypatch.chdir(tmp_path)
    assert main(["import", "hub", "mine"]) == 2
    assert "model_type is 'breeze'; Gregale knows llama" in capsys.readouterr().err
    with plugins_from(tmp_path):
        assert main(["import", "hub", "mine", "--plugins", "breeze"]) == 0
        assert RunDirectory(Path("mine")).read_config().plugins == ["breeze"]
        capsys.readouterr()
        assert main(["sample", "mine", *SAMPLE]) == 0
        assert capsys.readouterr().out == f"{PROMPT}{continued(tmp_path / 'llama')}\n"
        assert main(["export", "mine", "out"]) == 0
        assert values(tmp_path / "out") == values(hub)
        found = json.loads((tmp_path / "out" / "config.json").read_text())
        assert {key: found[key] for key in config | own} == config | own
    assert "breeze" not in FAMILIES
    with pytest.raises(ValueError, match="Cannot register the family llama: the name is taken"):
        register_family(Family("llama", "OtherForCausalLM", {}))


def test_the_text_part_of_a_gemma_3_with_images_is_imported_and_the_rest_named(tmp_path, capsys):
    """A text of the whole model, without an image, is that of the part."""
    hub, mine, out = (tmp_path / name for name in ("hub", "mine", "out"))
    text = SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 10, "sliding_window": 5}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 12}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4, eos_token_id=256
    )
    torch.manual_seed(1)
    whole = transformers.AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(hub)
    write_tokenizer(BytesTokenizer(), hub, CONTEXT)
    assert main(["import", str(hub), str(mine)]) == 0
    towers = sum(name.startswith("vision_tower.") for name in values(hub))
    line = (
        f"no part of a gemma3_text is left out: 2 tensors of multi_modal_projector, {towers} tensors of vision_tower."
    )
    assert line in capsys.readouterr().out.replace("\n", " ")
    assert main(["sample", str(mine), *SAMPLE]) == 0
    prompt = torch.tensor([list(PROMPT.encode())])
    ids = whole.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :].tolist()
    expected = bytes(token for token in ids if token < 256).decode("utf-8", "replace")
    assert capsys.readouterr().out == f"{PROMPT}{expected}\n"
    assert main(["export", str(mine), str(out)]) == 0
    start = "language_model."
    of_text = {name.removeprefix(start): each for name, each in values(hub).items() if name.startswith(start)}
    assert values(out) == of_text
    read = transformers.AutoConfig.from_pretrained(out)
    assert (read.model_type, read.architectures, read.eos_token_id) == ("gemma3_text", ["Gemma3ForCausalLM"], 256)


def test_layers_after_the_last_one_are_left_out_where_transformers_leaves_them_out(tmp_path, capsys):
    hub, mine = tmp_path / "hub", tmp_path / "mine"
    made("hy_v3", hub)
    before = load_file(hub / "model.safetensors")
    more = {f"model.layers.2.{name}": before["model.norm.weight"] for name in ("enorm.weight", "hnorm.weight")}
    save_file(before | more, hub / "model.safetensors")
    assert main(["import", str(hub), str(mine)]) == 0
    assert "no part of a hy_v3 is left out: 2 tensors of layers.2." in capsys.readouterr().out.replace("\n", " ")
    assert values(mine / "huggingface") == {name: array.tobytes() for name, array in before.items()}
