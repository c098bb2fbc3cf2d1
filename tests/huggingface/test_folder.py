"""A model's folder: what is none of one is told, and one that is made is there in full or not at all."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from haliax import Axis

from gregale.cli import main
from gregale.errors import UserError
from gregale.huggingface.families import FAMILIES, check_names, slots_of
from gregale.huggingface.folder import check_files, made_whole, open_folder
from gregale.huggingface.hub import model_folder
from gregale.model.config import ExpertsConfig
from gregale.model.llama import LlamaConfig
from gregale.programs.runtime.trained_model import find_run
from tests.huggingface.hub import SIZES

CONFIG = json.dumps({**SIZES, "model_type": "llama"})
HEADER = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
TENSOR = struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 4


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "has no config.json"),
        ({"config.json": CONFIG}, "has no model.safetensors and no model.safetensors.index.json"),
        ({"config.json": "[" * 100_000}, "config.json is damaged, not JSON"),
        ({"config.json": CONFIG.encode("utf-16")}, "config.json is damaged, not JSON"),
        ({"adapter_config.json": "{}", "adapter_model.safetensors": ""}, "is an adapter, by its adapter_config.json"),
        ({"adapter_config.json": "{}", "config.json": CONFIG}, "is an adapter"),
        ({"model-Q4_K_M.gguf": "GGUF"}, "has its weights in model-Q4_K_M.gguf, which is another format"),
        ({"consolidated.00.pth": ""}, "has its weights in consolidated.00.pth, a pickle"),
    ],
)
def test_what_is_no_model_in_safetensors_is_told(tmp_path, files, words):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=words):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "1.safetensors", "b": "2.safetensors"}, "has a twice, in 1.safetensors and in 2.safetensors"),
        ({"a": "../1.safetensors"}, "names the file '../1.safetensors', which does not lie beside it"),
        ({"a": "/etc/passwd"}, "names the file '/etc/passwd', which does not lie beside it"),
        ({"a": ".."}, "names the file '..', which does not lie beside it"),
        ({"a": ["1.safetensors"]}, "has no weight_map from tensors to files beside it"),
    ],
)
def test_an_index_names_files_beside_it_with_each_tensor_once(tmp_path, weight_map, words):
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in ("1", "2"):
        (tmp_path / f"{name}.safetensors").write_bytes(TENSOR)
    with pytest.raises(UserError, match=words):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "1.safetensors"])
def test_a_named_pipe_is_refused_unread(tmp_path, name):
    (tmp_path / "model.gguf").write_text("GGUF")
    with pytest.raises(UserError, match=r"model.gguf is a file; a model is a folder with config.json"):
        open_folder(tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"{name} is a folder, a pipe or a device"):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "merges.txt", "tokenizer.json", "1.safetensors"])
def test_a_link_out_of_the_folder_is_refused_unread(tmp_path, name, capsys):
    folder, secret = tmp_path / "model", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("{}")
    (folder / "config.json").write_text(CONFIG)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../secret")
    assert main(["import", str(folder), str(tmp_path / "mine")]) == 2
    assert f"{folder / name} is a link out of {folder}, to {secret}." in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "mine").exists()


def test_only_the_hub_caches_own_blobs_may_lie_outside(tmp_path):
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / "0a1b", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "c0ffee").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/c0ffee")
    (snapshot / "copy").symlink_to("config.json")
    check_files(snapshot, ("config.json", "copy"))
    (tmp_path / "linked").symlink_to(snapshot)
    check_files(tmp_path / "linked", ("config.json",))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0a1b")
    (blobs / "away").symlink_to(cache / "refs" / "main")
    for target in ("../../refs/main", "../../blobs/away", "../../blobs/below/c0ffee", "/dev/null"):
        (snapshot / "merges.txt").unlink(missing_ok=True)
        (snapshot / "merges.txt").symlink_to(target)
        with pytest.raises(UserError, match=r"merges.txt is a link out of"):
            check_files(snapshot, ("merges.txt",))


@pytest.mark.parametrize("name", ["tokenizer.json", "huggingface/merges.txt", "huggingface"])
def test_a_run_whose_model_has_a_link_out_of_it_is_refused(tmp_path, name):
    run, outside = tmp_path / "run", tmp_path / "outside"
    for folder in (run, outside):
        folder.mkdir()
        (folder / "config.yaml").write_text("")
    (outside / "merges.txt").write_text("secret")
    if "/" in name:
        (run / "huggingface").mkdir()
    (run / name).symlink_to(outside if name == "huggingface" else outside / "merges.txt")
    with pytest.raises(UserError, match=rf"is a link out of {run}, to {outside / 'merges.txt'}"):
        find_run(str(run))


def test_a_place_on_this_machine_never_asks_the_network(tmp_path, monkeypatch):
    """Nothing stands in for the hub here: what asked it would take long, and say something else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for given in ("./small", "../small", "models/../small", "/models/small", "a/b/c", "ünd/small"):
        assert model_folder(given) == Path(given)
    with pytest.raises(UserError, match=r"models/small is no folder, though there is a folder models here.*small@main"):
        model_folder("models/small")
    pytest.importorskip("huggingface_hub")
    with pytest.raises(UserError, match="a/b--c is no folder here, and a/b--c cannot be the name of a repository"):
        model_folder("a/b--c")


def test_a_file_that_names_more_experts_than_memory_holds_is_refused():
    config = LlamaConfig(layers=2, hidden=8, heads=2, mlp=4, vocabulary=16, experts=ExpertsConfig(2**31 - 1, width=4))
    model = jax.eval_shape(lambda: config.init(Axis("vocab", 16), jax.random.key(0)))
    slots = slots_of(model, FAMILIES["mixtral"])
    with pytest.raises(UserError, match=r"the model has 12,884,901,899 tensors, and its files 4\."):
        check_names({"model.norm.weight", "x", "y", "z"}, slots, "here")


def test_two_do_not_make_one_folder_at_once(tmp_path):
    with made_whole(tmp_path / "out", 0) as partial:
        (partial / "file").write_text("first")
        with (
            pytest.raises(UserError, match=rf"is being made by another process \(process {os.getpid()} on "),
            made_whole(tmp_path / "out", 0),
        ):
            pass
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from gregale.huggingface.folder import made_whole\n"
        "with made_whole(Path(sys.argv[1]), 0) as partial:\n"
        "    (partial / 'file').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "out[1]")], check=False)
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 2, f"a folder and a lock: {left}"
    with made_whole(tmp_path / "out[1]", 0) as partial:
        (partial / "file").write_text("whole")
        assert sorted(path.name for path in tmp_path.iterdir()) == [".out[1].lock", partial.name]
    assert [path.name for path in tmp_path.iterdir()] == ["out[1]"]
