"""Provides `gregale import`, which turns a folder of a hub model into a folder to train from, sample and evaluate."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import numpy as np

from gregale.axes.parameters import parameter_count
from gregale.data.chat.template import given_template
from gregale.data.config import DataConfig
from gregale.data.sources.base import expand
from gregale.data.store import progress_bars
from gregale.data.tokenizers import FileConfig, LibraryTokenizer, save_tokenizer
from gregale.errors import UserError
from gregale.huggingface.families import TypedJson, slots_of
from gregale.huggingface.folder import (
    CONFIG,
    TOKENIZER,
    Folder,
    copy_beside,
    made_whole,
    open_folder,
    read_json,
    write_json,
)
from gregale.huggingface.hub import model_folder, model_name
from gregale.huggingface.safetensors import Packed, Tensor, plan_file
from gregale.huggingface.tokenizer import end_of_document, rebuilt, rowless, tokenizer_of
from gregale.huggingface.weights import check_finite, check_tied, write_index
from gregale.model.config import ComputeConfig
from gregale.programs.command import Command
from gregale.programs.runtime.setup import padded_vocabulary
from gregale.runs.config import BatchConfig, TrainConfig
from gregale.runs.run_directory import RunDirectory
from gregale.settings import Settings, setting, whole
from gregale.storage import write_bytes
from gregale.streams import say

MAX_SEQUENCE_LENGTH = 4096  # tokens; limit of the written configuration, not of a run


@dataclass(frozen=True)
class ImportOptions(Settings):
    source: str = field(metadata={"help": "the model's folder, or its name on the hub: ORG/NAME, ORG/NAME@REVISION"})
    target: str = field(metadata={"help": "the folder to make; a bare name is in the current folder, not under runs/"})
    end_of_document: str | None = setting(
        None, "the name of the token that ends a text; null: the token of eos_token_id"
    )
    plugins: list[str] = setting(list, "modules to import first, for a family of your own")


def main(options: ImportOptions) -> int:
    """Check the model, then copy it; after a failure there is no target folder."""
    folder, target = open_folder(model_folder(options.source)), Path(expand(options.target, "target"))
    end = options.end_of_document or end_of_document(folder.path, folder.saved, "--end_of_document NAME")
    config = replace(configuration(folder, target, end, model_name(options.source)), plugins=options.plugins)
    beyond = rowless(folder.path, folder.model.vocabulary or 0)
    given = tokenizer_of(folder.path, beyond)
    read = rebuilt(folder.path, given, folder.family.model_type)
    text = json.dumps(read)
    tokenizer = LibraryTokenizer(text, end, str(folder.path / TOKENIZER))
    if (rows := folder.model.vocabulary or 0) < tokenizer.vocabulary_size:
        raise UserError(
            f"{folder.path}: the model has {rows} rows, and the tokenizer {tokenizer.vocabulary_size} tokens: some "
            "that texts consist of have none. They are not of one model, or its tables were not made longer with "
            "tokens that were added."
        )
    tokenizer.chat_template = given_template("", folder.path / TOKENIZER, end)
    vocabulary = padded_vocabulary(config, tokenizer.vocabulary_size)
    # The key is made inside, so that no device is started: a run on this machine may hold them.
    model = jax.eval_shape(lambda: config.model.init(vocabulary, jax.random.key(0)))
    folder.check(slots_of(model, folder.family))
    size = sum(tensor.end - tensor.begin for tensor in folder.tensors.values())
    with made_whole(target, size) as partial_target, progress_bars() as report:
        run = RunDirectory(partial_target)
        run.huggingface.mkdir()
        copy_beside(folder.path, run.huggingface)
        if beyond or read != given:
            write_bytes(run.huggingface / TOKENIZER, text.encode())
        saved = {key: value for key, value in folder.saved.items() if key not in ("quantization_config", "auto_map")}
        if not (saved.get("dtype") or saved.get("torch_dtype")):  # for `export` of a run
            dtype = str(np.result_type(*{tensor.dtype for tensor in folder.tensors.values()}))  # holds all values
            saved["torch_dtype"] = dtype
        if saved != read_json(folder.path / CONFIG):
            write_json(Path(str(run.huggingface / CONFIG)), saved)
        check_tied(folder)
        copy_weights(folder, partial_target / run.huggingface.name, lambda done: report("copying", done, size))
        save_tokenizer(tokenizer, run.path)
        run.write_config(config)
    if folder.left_out:
        words = (name.removeprefix("model.").split(".") for name in folder.left_out)
        others = Counter(".".join(each[: 2 if each[0] == "layers" else 1]) for each in words)
        text = ", ".join(f"{count:,} tensors of {name}" for name, count in others.items())
        say(f"{target}: what is no part of a {folder.family.model_type} is left out: {text}.")
    if beyond:
        say(f"{target}: tokens that the model has no rows for are left out: {', '.join(beyond)}.")
    if read != given:
        say(
            f"{target}: its tokenizer treats spaces as transformers does, which builds a LlamaTokenizer anew and does "
            f"not read that from {TOKENIZER}: spaces at the beginning of a text have other ids than by the file."
        )
    say(
        f"{target}: {parameter_count(model):,} parameters of a {folder.family.model_type}, "
        f"{tokenizer.vocabulary_size:,} tokens. `gregale sample {target} PROMPT` continues a text; "
        f"`gregale train CONFIG --start_from {target}` trains on, with `model` and "
        f"`data.tokenizer` of {target / 'config.yaml'}."
    )
    return 0


def copy_weights(folder: Folder, target: Path, report: Callable[[int], None]) -> None:
    """Check tensors, and copy their files, or write new ones without MXFP4 and other parts.

    `report`: takes the bytes so far
    """
    sizes, done = {name: tensor.end - tensor.begin for name, tensor in folder.tensors.items()}, 0
    is_new = folder.left_out is not None or any(isinstance(tensor, Packed) for tensor in folder.tensors.values())
    files: dict[str, list[str]] = {}
    for file in folder.files:
        tensors = {name: tensor for name, tensor in folder.tensors.items() if tensor.path == file}
        if is_new:
            write_decoded(target / file.name, tensors)
        else:
            for tensor in tensors.values():
                check_finite(tensor, tensor.mapped())
            shutil.copyfile(file, target / file.name)
        files[file.name] = list(tensors)
        report(done := done + sum(sizes[name] for name in tensors))
    if is_new:
        write_index(target, files, sizes, {})


def write_decoded(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Check tensors, and write them to a file with those in MXFP4 decoded."""
    shapes, dtypes = ({name: getattr(each, of) for name, each in tensors.items()} for of in ("shape", "dtype"))
    plan = plan_file(path, shapes, dtypes)
    plan.make()
    for name, written in plan.tensors.items():
        source, values = tensors[name], written.mapped(writable=True)
        for place, piece in source.decoded() if isinstance(source, Packed) else [(..., source.mapped())]:
            check_finite(source, piece)
            values[place] = piece


def configuration(folder: Folder, target: Path, end: str, name: str) -> TrainConfig:
    """Return a configuration with the model, its tokenizer and its context, for the user to complete."""
    saved = TypedJson(folder.saved, str(folder.path / CONFIG))
    context = saved.read("max_position_embeddings", int, MAX_SEQUENCE_LENGTH, whole(1))
    exact = all(tensor.dtype.itemsize >= 4 for tensor in folder.tensors.values())
    tokenizer = FileConfig(str((RunDirectory(target).huggingface / TOKENIZER).absolute()), end)
    return TrainConfig(
        name=name.lstrip(".-") or "imported",
        steps=1,
        model=folder.model,
        compute=ComputeConfig(dtype="float32" if exact else "bfloat16"),
        data=DataConfig(tokenizer=tokenizer, held_out=0),
        batch=BatchConfig(sequence_length=min(context, MAX_SEQUENCE_LENGTH)),
    )


COMMAND = Command(main=main, options=ImportOptions, positional=("source", "target"))
