"""Bad configurations through the command line: one paragraph, exit code 2, and nothing written."""

import json
import shlex
from pathlib import Path

import draccus
import pytest
import yaml

from gregale.cli import main
from gregale.data.tokenizer_training import train_bpe
from gregale.data.tokenizers import BpeConfig, FileConfig, TokenizerConfig
from tests.programs.tiny import write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Shared, since a refused command leaves a folder as it was."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def folder(inputs, monkeypatch) -> Path:
    monkeypatch.chdir(inputs)
    return inputs


def content(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(folder: Path, capsys, *arguments: str) -> str:
    """The one paragraph on standard error; the folder is as it was."""
    before = content(folder)
    assert main(["train", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gregale: error: ")
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    assert content(folder) == before
    return captured.err


DILOCO, STREAMING, MIXTURES = "--sync.type diloco", "--sync.type streaming_diloco", "--data.replica_mixtures"
STAGES = "--mesh.replica 1 --mesh.stage 2 --model.layers 4 --pipeline.repeats 1"
THREE = "[" + ", ".join(3 * ["{words: 1}"]) + "]"
MISTAKES = {
    "--batch.size 12": "batch.size is 12 ... replica 2 x data 2 x microbatches 2 = 8 ... 8 or 16 would work",
    "--data.sources '{}'": "data.sources: empty ... text, jsonl, csv, tsv, parquet, huggingface, tokens, chat",
    "--data.sources.words.files '*.a' '*.b'": "one word ... commas: `--data.sources.words.files *.a,*.b`",
    "--batch.microbatches 3": "batch.size is 8 ... microbatches 3 = 12 ... 12 would work",
    "--model.hidden 30 --model.head_size 16": "model.hidden is 30 ... = 4 ... 30 / 4 = 7.5 ... 28 or 32 would",
    "--model.kv_heads 1": "model.kv_heads is 1 ... model 2 = 2 devices ... model.kv_heads 2 would work",
    "--model.mlp 63": "model.mlp is 63 ... 63 / 2 = 31.5 ... 62 or 64 would work",
    "--model.hidden 1073741824 --model.mlp 1073741824": "8,070, ... 1,000,000,000,000,000 is the most ... model.hidden",
    "--model.vocabulary 256": "model.vocabulary is 256 ... the tokenizer has 257 tokens ... at least 257",
    "--mesh.replica 4": "mesh: ... 4 * 1 * 1 * 2 * 2 = 16 devices, but there are 8 ... `cpu_devices: 16`",
    "--mesh.replica 3 --mesh.data -1": "mesh.data is -1 ... = 6 devices ... does not divide the 8",
    f"{STAGES} --pipeline.microbatches 8": "batch.size is 8 ... 1 rows ... 8 / mesh.stage 2 = 4 ... batch.size 32",
    f"{STAGES} --batch.microbatches 4": "data 2 x stage 2 x microbatches 4 = 16 ... batch.size 16 would work",
    "--mesh.context 2 --mesh.data 1 --compute.attention cudnn": "mesh.context is 2 ... `auto` would work",
    "--mesh.replica -1 --mesh.data -1": "mesh.data is -1 (on the command line), and so is mesh.replica",
    "--distributed.processes 2": "distributed.processes is 2 ... distributed.coordinator is not set",
    "--cpu_devices 3 --distributed.processes 2": "cpu_devices is 3 ... Use a multiple of 2",
    f"{STREAMING} --sync.period 4 --sync.delay 4 --sync.fragments 2": "sync.delay is 4 and sync.period is 4 ... most 3",
    f"{STREAMING} --sync.fragments 6 --model.layers 4": "sync.fragments is 6 ... the 4 layers ... 1 to 4 + 1 = 5",
    f"{DILOCO} --sync.outer.type muon": "sync.outer.type is 'muon' (on the command line): it needs whole matrices",
    f"{DILOCO} --mesh.island 2 --mesh.data 1 {MIXTURES} '{THREE}'": "mesh.island is 2: ... 3 mixtures. Give 2 mixtures",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_what_does_not_fit(folder, capsys, arguments):
    error = refused(folder, capsys, "tiny.yaml", *shlex.split(arguments))
    for part in MISTAKES[arguments].split(" ... "):
        assert part in error


@pytest.mark.parametrize(
    "tokenizer", [FileConfig(path="words.json", end_of_document="<|end_of_document|>"), BpeConfig()]
)
def test_a_vocabulary_too_small_for_the_tokenizer_is_refused_before_the_text_is_read(folder, capsys, tokenizer):
    words = train_bpe(BpeConfig(vocabulary=300), iter(["the wind and the sea and the gale"] * 50))
    Path("words.json").write_text(json.dumps(words.to_json()["library"]))
    tokens = words.vocabulary_size if isinstance(tokenizer, FileConfig) else 257
    options = yaml.safe_dump(draccus.encode(tokenizer, TokenizerConfig), default_flow_style=True).strip()
    error = refused(folder, capsys, "tiny.yaml", "--data.tokenizer", options, "--model.vocabulary", str(tokens - 1))
    assert f"model.vocabulary is {tokens - 1}, but the tokenizer has {tokens} tokens" in error
