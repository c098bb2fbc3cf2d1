"""`gregale import`, `train --start_from` and `export`, with transformers on both ends."""

import errno
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from gregale.cli import main
from gregale.cli.invocation import bound
from gregale.data.preparation import prepare
from gregale.data.tokenizers import BpeConfig, FileConfig, load_tokenizer
from gregale.errors import UserError, install_hint
from gregale.huggingface.families import FAMILIES, parameters_of
from gregale.huggingface.folder import INDEX, made_whole, open_folder
from gregale.huggingface.hub import shape_and_tokenizer
from gregale.huggingface.safetensors import read_header
from gregale.model.config import HuggingFaceConfig, Llama3Scaling, YarnScaling
from gregale.model.llama import LlamaConfig
from gregale.programs.command import Command
from gregale.programs.exporting import Exported, rounded, write_beside
from gregale.programs.runtime.trained_model import find_run, on_devices, open_trained, opened, set_up_run
from gregale.programs.tokenize import TokenizeOptions
from gregale.programs.train.resume import origin_of
from gregale.runs.config import TrainConfig
from gregale.runs.run_directory import RunDirectory
from tests.huggingface.hub import CONTEXT, made
from tests.packages import Package
from tests.programs.tiny import losses, trained, write_config, write_further

torch, transformers = Package("torch"), Package("transformers")

SHARDED = "20KB"


@pytest.fixture(scope="module")
def hub(inputs) -> Path:
    """A folder as the hub has it, in several files."""
    made("qwen3", inputs / "hub", SHARDED)
    assert (inputs / "hub" / INDEX).is_file()
    return inputs / "hub"


@pytest.fixture(scope="module")
def imported(inputs, hub) -> Path:
    assert main(["import", str(hub), str(inputs / "mine")]) == 0
    return inputs / "mine"


def tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Every tensor of a folder: its file and its bytes."""
    found = open_folder(folder).tensors
    return {name: (tensor.path.name, np.array(tensor.mapped()).tobytes()) for name, tensor in found.items()}


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def in_two_dtypes(folder: Path) -> None:
    """config.json says bfloat16, and the norms and a layer are in float32."""
    from safetensors.torch import load_file, save_file  # here, since it imports PyTorch

    for path in folder.glob("*.safetensors"):
        found = load_file(path).items()
        save_file({name: each if "norm" in name or ".1." in name else each.bfloat16() for name, each in found}, path)
    change_json(folder / "config.json", dtype="bfloat16")


@pytest.mark.parametrize("dtypes", ["bfloat16", "both"])
def test_a_round_trip_gives_the_same_tensors_and_files(gregale, tmp_path, capsys, dtypes):
    made("qwen3", tmp_path / "hub", SHARDED, "float32" if dtypes == "both" else "bfloat16")
    saved = json.loads((tmp_path / "hub" / "config.json").read_text())
    if dtypes == "bfloat16":  # which the files still say
        assert saved.pop("dtype") == "bfloat16"
        (tmp_path / "hub" / "config.json").write_text(json.dumps(saved))
    if dtypes == "both":
        in_two_dtypes(tmp_path / "hub")
    with jax.transfer_guard("disallow"):  # devices may belong to a run; the first number sent to one would start them
        assert gregale("import", tmp_path / "hub", tmp_path / "mine") == 0
    assert gregale("export", tmp_path / "mine", tmp_path / "out") == 0
    assert "rounded" not in capsys.readouterr().out
    assert tensors(tmp_path / "out") == tensors(tmp_path / "hub")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hub", "out"))
    assert {key: value for key, value in after.items() if key in before} == before
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", INDEX):
        if name != INDEX or dtypes != "both":  # its total size was that before the change
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "hub" / name).read_bytes(), name
    assert {path.name for path in tmp_path.iterdir()} == {"hub", "mine", "out"}, "nothing temporary is left"
    if dtypes == "both":
        assert gregale("export", tmp_path / "mine", tmp_path / "small", "--dtype", "bfloat16") == 0
        floats = sum("norm" in name or ".1." in name for name in tensors(tmp_path / "hub"))
        assert f"rounded: {floats} of 25 tensors from float32 to bfloat16; `--dtype float32`" in capsys.readouterr().out


@pytest.mark.parametrize(("written", "advice"), [("float32", "export writes no wider dtype"), ("float16", "`--dtype")])
def test_a_note_of_rounding_advises_no_dtype_that_was_written(written, advice):
    note = rounded({"a": np.dtype(written)}, {"a": np.dtype(np.float64)})
    assert note.startswith(f"rounded: 1 of 1 tensors from float64 to {written}; {advice}")


def test_names_of_special_tokens_in_a_prompt_are_told_or_are_the_tokens(gregale, hub, imported, capsys):
    arguments = "sample", imported, "the <|end_of_document|>wind ", "--tokens", "12", "--temperature", "0"
    capsys.readouterr()
    assert gregale(*arguments) == 0
    assert (
        "1 names of special tokens in the prompts are encoded as characters, most often <|end_of_document|> (1). With "
        "parse_special they are the tokens."
    ) in capsys.readouterr().err
    assert gregale(*arguments, "--parse_special", "true") == 0
    out, err = capsys.readouterr()
    assert "special" not in err
    prompt = transformers.AutoTokenizer.from_pretrained(hub)(arguments[2], return_tensors="pt")
    assert load_tokenizer(imported).parsing_special().encode(arguments[2]).tolist() == prompt["input_ids"][0].tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32)
    ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :].tolist()
    expected = bytes(token for token in ids if token < 256).decode("utf-8", "replace")
    assert out == f"{arguments[2]}{expected}\n"


@pytest.fixture(scope="module")
def on_from_it(inputs, imported) -> Path:
    """A run of two steps from the imported model, on a mesh and in float32."""
    write_further(inputs, imported)
    return trained(inputs, "on.yaml", "on", "--start_from", "mine")


def test_the_first_loss_is_that_of_transformers_on_the_same_tokens(gregale, hub, on_from_it):
    trained = open_trained(str(on_from_it), None, None)
    config = trained.setup.config
    corpus = prepare(config.data, config.batch.sequence_length, config.seed)
    rows = [corpus.train[i] for i in range(config.batch.size)]
    tokens = torch.tensor(np.stack([row["tokens"] for row in rows]), dtype=torch.long)
    targets = torch.tensor(np.stack([row["targets"] for row in rows]), dtype=torch.long)
    weights = torch.tensor(np.stack([row["loss_mask"] for row in rows]))
    positions = torch.tensor(np.stack([row["positions"] for row in rows]), dtype=torch.long)
    segments = torch.tensor(np.stack([row["segment_ids"] for row in rows]))
    length = tokens.shape[1]
    back = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    seen = (back >= 0) & (back < 7) & (segments[:, :, None] == segments[:, None, :])
    mask = torch.where(seen, 0.0, -torch.inf)[:, None]
    model = transformers.AutoModelForCausalLM.from_pretrained(hub, attn_implementation="eager")
    masks = {"full_attention": mask, "sliding_attention": mask}
    with torch.no_grad():
        logits = model(tokens, attention_mask=masks, position_ids=positions).logits
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    expected = float((each * weights).sum() / weights.sum())
    assert dict(losses(on_from_it))[1] == pytest.approx(expected, abs=1e-4)


def test_another_method_in_stages_with_a_split_vocabulary_starts_from_it_too(gregale, inputs, on_from_it):
    options = ["--sync.type=streaming_diloco", "--sync.period=2", "--sync.fragments=2", "--sync.delay=1"]
    options += ["--mesh={replica: 2, stage: 2, data: 1, model: 2}", "--pipeline.repeats=1", "--model.row_multiple=8"]
    options += ["--data.tokenizer.parse_special=true"]  # the text has no name, and the tokens are the same
    name = "other"
    assert gregale("train", "on.yaml", "--name", name, "--start_from", "mine", "--steps", "2", *options) == 0
    assert dict(losses(inputs / "runs" / name))[1] == pytest.approx(dict(losses(on_from_it))[1], abs=1e-4)
    whole, run = parameters_of(open_trained(name, None, 2).model), find_run(name)
    config = on_devices(run.read_config(), 2)
    with opened(run, set_up_run(run, config), None) as found:
        for path, leaf in whole.items():  # what is read one by one is the model that is evaluated
            np.testing.assert_array_equal(found.read(path).array, leaf.array, err_msg=path)


def test_what_was_trained_goes_back_with_what_it_came_with(gregale, inputs, hub, on_from_it, capsys):
    assert gregale("export", "on", inputs / "trained", "--dtype", "bfloat16", "--devices", "2") == 0
    assert "tensors from float32 to bfloat16" in capsys.readouterr().out
    found = json.loads((inputs / "trained" / "config.json").read_text())
    assert (found["model_type"], found["dtype"]) == ("qwen3", "bfloat16")
    assert set(tensors(inputs / "trained")) == set(tensors(hub))
    card = (inputs / "trained" / "README.md").read_text()
    assert "| steps | 2 of 256 tokens, 512 tokens in all |" in card
    assert "| started from | mine |" in card
    model = transformers.AutoModelForCausalLM.from_pretrained(inputs / "trained", dtype=torch.float32)
    ours = jax.tree.leaves(open_trained("on", None, 1).model)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == sum(leaf.size for leaf in ours)


def test_a_run_of_ones_own_is_exported_without_the_padding_of_its_vocabulary(gregale, inputs, whole):
    assert gregale("export", whole, inputs / "own", "--shard_gigabytes", "0.00001") == 0
    folder = open_folder(inputs / "own")
    assert folder.model.vocabulary == folder.tensors["model.embed_tokens.weight"].shape[0] == 257
    tokenizer = transformers.AutoTokenizer.from_pretrained(inputs / "own")
    text = "a gale, ünd\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    files = sorted(path.name for path in (inputs / "own").glob("*.safetensors"))
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]


def first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def set_first(folder: Path, value: float) -> None:
    tensor = next(iter(read_header(first_file(folder)).values()))
    with open(tensor.path, "r+b") as file:
        file.seek(tensor.begin)
        file.write(np.float32(value).tobytes())


def large_id(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model["vocab"]["zz"] = 2_000_000_000
    change_json(folder / "tokenizer.json", model=model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"intermediate_size": 40}, r"mlp.gate_proj.weight has the shape \[48, 32\], and by config.json .*\[40, 32\]"),
        ({"model_type": "olmo2"}, r"lacks .*post_feedforward_layernorm.* and also has .*input_layernorm"),
        ({"tie_word_embeddings": True}, "lm_head.weight is another tensor than model.embed_tokens.weight, though tie"),
        (lambda folder: set_first(folder, np.nan), "holds NaN or infinity"),
        (lambda folder: first_file(folder).unlink(), "lacks model-00001-of-.*a download that was cut off"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (large_id, r"tokenizer.json: the token 'zz' has the id 2,000,000,000; ids up to 16,777,215 work"),
        (
            lambda folder: change_json(folder / "tokenizer.json", added_tokens=[{"id": 256}]),
            r"tokenizer.json is damaged: \{'id': 256\} is no added token",
        ),
    ],
)
def test_a_folder_that_is_wrong_is_refused_in_one_line(refused, hub, tmp_path, change, words):
    shutil.copytree(hub, tmp_path / "hub")
    if callable(change):
        change(tmp_path / "hub")
    else:
        change_json(tmp_path / "hub" / "config.json", **change)
    assert re.search(words, refused("import", tmp_path / "hub", tmp_path / "mine"))
    assert [path.name for path in tmp_path.iterdir()] == ["hub"], "nothing is half-written"


def test_what_does_not_fit_is_told_before_anything_is_written(inputs, imported, refused):
    unfit = ("train", "tiny.yaml", "--name", "unfit", "--start_from")
    assert "is of another shape: model.layers 2 -> 1" in refused(*unfit, "mine")
    assert not (inputs / "runs" / "unfit").exists()
    assert "`gregale import hub NAME`" in refused(*unfit, "hub")
    assert "is an imported model, not a run" in refused("train", "tiny.yaml", "--runs", ".", "--name", "mine")
    assert "--data" in refused("eval", imported)
    assert "exists already" in refused("import", inputs / "hub", imported)
    assert "nowhere is not a folder, and no name of a model on the hub" in refused("import", "nowhere", inputs / "new")
    with pytest.raises(UserError, match="and its disk has"), made_whole(inputs / "large", 2**60):
        pass


def add_token(folder: Path, name: str, special: bool) -> None:
    """A token after all others, for which the model has no row."""
    saved = json.loads((folder / "tokenizer.json").read_text())
    shared = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [*saved["added_tokens"], {"id": 257, "content": name, "special": special, **shared}]
    change_json(folder / "tokenizer.json", added_tokens=added)


def test_special_tokens_without_a_row_are_left_out_and_a_word_is_refused(gregale, hub, tmp_path, capsys, refused):
    """Gemma 3 without images has one, that of an image."""
    shutil.copytree(hub, tmp_path / "hub")
    add_token(tmp_path / "hub", "<image>", special=True)
    assert gregale("import", tmp_path / "hub", tmp_path / "mine") == 0
    assert "tokens that the model has no rows for are left out: <image>." in capsys.readouterr().out
    assert load_tokenizer(tmp_path / "mine").vocabulary_size == 257
    with pytest.raises(UserError, match=r"tokens without a row in the model's tables: <image>. `gregale import"):
        shape_and_tokenizer(HuggingFaceConfig(str(tmp_path / "hub")))
    model, tokenizer = shape_and_tokenizer(HuggingFaceConfig(str(tmp_path / "mine" / "huggingface")))
    assert tokenizer is not None
    assert tokenizer.build().fingerprint == load_tokenizer(tmp_path / "mine").fingerprint
    assert model == find_run(str(tmp_path / "mine")).read_config().model
    shutil.copytree(hub, tmp_path / "word")
    add_token(tmp_path / "word", "<word>", special=False)
    assert "has 257 rows, and the tokenizer 258 tokens" in refused("import", tmp_path / "word", tmp_path / "other")


def test_a_run_of_ones_own_has_no_tokens_of_the_family_and_a_longer_context_is_told(imported, tmp_path):
    """OLMo 2 and Gemma have ids of filling, where config.json names none: a token that would not be trained on."""
    run, folder = find_run(str(imported)), tmp_path / "out"
    family = FAMILIES["olmo2"]
    model = LlamaConfig(layers=1, hidden=32, heads=2, mlp=64, **family.block)
    setup = set_up_run(run, on_devices(replace(run.read_config(), model=model), 1))
    shutil.copytree(imported, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "huggingface")
    folder.mkdir()
    write_beside(folder, Exported(RunDirectory(tmp_path / "run"), setup, 0, family, "float32"), 257, "float32")
    found = transformers.AutoConfig.from_pretrained(folder)
    assert (found.pad_token_id, found.bos_token_id, found.eos_token_id) == (None, None, 256)
    config = on_devices(run.read_config(), 1)
    longer = set_up_run(run, replace(config, batch=replace(config.batch, sequence_length=4 * CONTEXT)))
    write_beside(folder, Exported(run, longer, 0, FAMILIES["qwen3"], "float32"), 257, "float32")
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 4 * CONTEXT


def test_a_value_that_float16_cannot_hold_is_refused(inputs, imported, tmp_path, refused):
    shutil.copytree(imported, tmp_path / "mine")
    set_first(tmp_path / "mine" / "huggingface", 1e6)
    assert "too large for float16" in refused("export", tmp_path / "mine", tmp_path / "out", "--dtype", "float16")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def cache(hub, tmp_path, monkeypatch) -> Path:
    """A cache of the hub with two versions of a repository `org/tiny`, and nothing else to be had."""
    from huggingface_hub import constants

    repository = tmp_path / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    for name, commit in (("main", "1" * 40), ("v2", "2" * 40)):
        (repository / "refs" / name).write_text(commit)
        shutil.copytree(hub, repository / "snapshots" / commit)
    (repository / "snapshots" / ("1" * 40) / "tokenizer.json").unlink()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_name_of_the_hub_is_taken_from_its_cache(gregale, cache, tmp_path, hub, refused):
    assert gregale("import", "org/tiny@v2", tmp_path / "mine") == 0
    assert tensors(tmp_path / "mine" / "huggingface") == tensors(hub)
    assert "name: tiny\n" in (tmp_path / "mine" / "config.yaml").read_text()
    for name, words in (
        ("org/tiny", "has no tokenizer.json"),
        ("org/other", "org/other is no folder here, and HF_HUB_OFFLINE says not to ask the hub; the cache does not"),
        ("org/tiny@v3", "org/tiny@v3 is no folder here, and HF_HUB_OFFLINE says"),
    ):
        assert words in refused("import", name, tmp_path / "new")
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "RepoNotFound", "the hub has no repository org/other that your token may read"),
        (403, "GatedRepo", "requires that you accept the conditions of"),
        (404, "RevisionNotFound", "org/other has no branch, tag or commit v9"),
    ],
)
def test_what_the_hub_answers_is_told_in_one_line(refused, tmp_path, monkeypatch, status, code, words):
    from huggingface_hub import constants

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        assert re.search(words, refused("import", "org/other@v9", tmp_path / "new"))
        server.shutdown()


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert f"needs the extra `hf`. {install_hint('hf')}" in refused("import", "org/other", tmp_path / "new")


def configured(file: str, *arguments: str) -> TrainConfig:
    """The configuration that a program gets."""
    found = []
    command = Command(main=lambda _, config: found.append(config) or 0, options=TokenizeOptions, config=TrainConfig)
    assert bound("train", replace(command, positional=("config",)), [file, *arguments])() == 0
    return found[0]


def test_the_shape_and_the_tokenizer_of_a_model_of_the_hub(inputs, hub, cache, monkeypatch):
    monkeypatch.chdir(inputs)
    tiny = configured("tiny.yaml", "--data.tokenizer.type", "bytes")
    write_config(inputs, "shape.yaml", model={"type": "huggingface", "path": str(hub)})
    config = configured("shape.yaml")
    assert config.model == open_folder(hub).model
    assert config.data.tokenizer == FileConfig(str(hub / "tokenizer.json"), "<|end_of_document|>")
    assert replace(config, model=tiny.model, data=tiny.data) == tiny
    assert configured("shape.yaml", "--model.with_tokenizer", "false").data == tiny.data
    bpe = configured("shape.yaml", "--data.tokenizer.type", "bpe", "--model.path", "org/tiny")
    assert (bpe.model, bpe.data.tokenizer) == (config.model, BpeConfig())
    with pytest.raises(UserError, match=r"model\.path: org/tiny@v3 is no folder here"):
        configured("shape.yaml", "--model.path", "org/tiny@v3")


def test_a_disk_that_fills_up_leaves_nothing(imported, tmp_path, monkeypatch, refused):
    """After the room was looked at: another program has taken it."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=full))
    assert "No space left on device" in refused("export", imported, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_run_starts_with_a_new_rotary_scaling_but_not_without_that_of_the_model(tmp_path):
    run, model = RunDirectory(tmp_path / "first"), LlamaConfig()
    longer = TrainConfig("longer", 1, start_from=str(run.path), model=replace(model, rotary_scaling=YarnScaling()))
    for before in (None, Llama3Scaling()):
        run.write_config(replace(longer, model=replace(model, rotary_scaling=before)))
        assert origin_of(longer).path == run.path
    with pytest.raises(UserError, match=r"of another shape: model[.]rotary_scaling"):
        origin_of(replace(longer, model=model))
