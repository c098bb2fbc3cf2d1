"""`gregale export`: the model of a run becomes a folder that transformers, and what builds on it, loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from haliax import Axis

import gregale
from gregale.data.progress import progress_bars
from gregale.data.sources.base import expand
from gregale.data.tokenizers import Tokenizer, load_tokenizer
from gregale.errors import UserError
from gregale.huggingface.config import written_config
from gregale.huggingface.families import Family, family_that_has
from gregale.huggingface.folder import BESIDE, CONFIG, GENERATION, INDEX, copy_beside, made_whole, read_json, write_json
from gregale.huggingface.names import Slot, slots_of
from gregale.huggingface.tokenizer import write_tokenizer
from gregale.huggingface.weights import bytes_of, files_as, files_of, write_index, write_model
from gregale.model.config import LlamaConfig
from gregale.model.llama import parameter_count
from gregale.programs.run.trained import Trained, open_trained
from gregale.services.command import Command
from gregale.services.run_directory import RunDirectory
from gregale.settings import Settings, above, shown, whole

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
GIGABYTE = 10**9
SHARD_GIGABYTES = 5.0


@dataclass(frozen=True)
class ExportOptions(Settings):
    """Options of the command."""

    run: str = field(metadata={"help": "the run: its directory, or its name under runs/"})
    target: str = field(metadata={"help": "the folder to make"})
    step: int | None = field(
        default=None, metadata={"help": "the checkpoint's step; null: the newest", "range": whole(0)}
    )
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "of the tensors: float32, bfloat16 or float16; null: as the imported model came, else float32",
            "aliases": ("torch_dtype",),
        },
    )
    shard_gigabytes: float | None = field(
        default=None,
        metadata={
            "help": "size of a file at most; null: the files that an imported model came in, else 5",
            "range": above(0),
            "aliases": ("max_shard_size",),
        },
    )
    devices: int = field(
        default=1, metadata={"help": "devices to hold the model on, each its part of it", "range": whole(1)}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UserError(f"dtype is {shown(self.dtype)}; valid choices: {', '.join(DTYPES)}.")


@dataclass(frozen=True)
class CameWith:
    """What an imported model came with, all of it empty for another one: config.json, and the index of its files."""

    config: Mapping[str, Any]
    index: Mapping[str, Any]

    @staticmethod
    def of(run: RunDirectory) -> CameWith:
        found = [run.huggingface / name for name in (CONFIG, INDEX)]
        return CameWith(*(read_json(path) if path.is_file() else {} for path in found))

    @property
    def dtype(self) -> str:
        found = self.config.get("dtype", self.config.get("torch_dtype"))
        return found if found in DTYPES else "float32"


def main(options: ExportOptions) -> int:
    """Writes the folder, in full or not at all."""
    target = Path(expand(options.target))
    trained = open_trained(options.run, options.step, options.devices)
    tokenizer, came_with = load_tokenizer(trained.run.path), CameWith.of(trained.run)
    config = trained.setup.config.model
    assert isinstance(config, LlamaConfig)
    family = family_that_has(config, came_with.config.get("model_type"))
    dtype_name = options.dtype or came_with.dtype
    dtype = np.dtype(DTYPES[dtype_name])
    rows = config.vocabulary or tokenizer.vocabulary_size
    slots = [cut_to(slot, rows) for slot in slots_of(trained.setup.model, family)]
    sizes = bytes_of(slots, dtype)
    files = files_for(sizes, options.shard_gigabytes, came_with)
    with made_whole(target, sum(sizes.values())) as folder, progress_bars() as report:
        copy_beside(trained.run.huggingface, folder, [name for name in BESIDE if name not in (CONFIG, INDEX)])
        write_model(trained.model, slots, folder, files, dtype, report)
        if len(files) > 1:
            write_index(folder, files, sizes, came_with.index.get("metadata", {}))
        write_settings(folder, trained, tokenizer, family, rows, came_with, dtype_name)
        (folder / "README.md").write_text(model_card(trained, family, dtype_name), encoding="utf-8")
    made = f"a {family.model_type} in {dtype_name}, {len(files)} file(s)"
    print(f"{target}: step {trained.step} of {trained.run.path}, {made}.")
    return 0


def cut_to(slot: Slot, rows: int) -> Slot:
    """A slot without the padding of the vocabulary."""
    return replace(slot, axes=tuple(Axis(axis.name, rows) if axis.name == "vocab" else axis for axis in slot.axes))


def files_for(sizes: Mapping[str, int], gigabytes: float | None, came_with: CameWith) -> dict[str, list[str]]:
    """Which tensors go to which file."""
    if gigabytes is None and came_with.config:
        weight_map = came_with.index.get("weight_map")
        if weight_map is None:
            return files_of(sizes, sum(sizes.values()))
        if set(weight_map) == set(sizes):
            return files_as(weight_map)
    return files_of(sizes, int((gigabytes or SHARD_GIGABYTES) * GIGABYTE))


def write_settings(
    folder: Path,
    trained: Trained,
    tokenizer: Tokenizer,
    family: Family,
    rows: int,
    came_with: CameWith,
    dtype: str,
) -> None:
    """Everything beside the tensors: what the model came with, and else what is known of it."""
    config, context = trained.setup.config, trained.setup.config.batch.sequence_length
    end = tokenizer.end_of_document
    saved = {"max_position_embeddings": context, "bos_token_id": None, "eos_token_id": end, **came_with.config}
    assert isinstance(config.model, LlamaConfig)
    key = "dtype" if "dtype" in saved else "torch_dtype"
    write_json(folder / CONFIG, written_config(config.model, family, rows, saved) | {key: dtype})
    if not came_with.config:
        write_json(folder / GENERATION, {"eos_token_id": end, "_from_model_config": True})
        write_tokenizer(tokenizer, folder, context)


def model_card(trained: Trained, family: Family, dtype: str) -> str:
    """What was trained, on what, how."""
    config, step = trained.setup.config, trained.step
    facts = {
        "architecture": f"{family.architecture}, {parameter_count(trained.setup.model):,} parameters in {dtype}",
        "trained by": f"Gregale {gregale.__version__}",
    }
    if config.start_from:
        facts["started from"] = config.start_from
    if step:
        facts["steps"] = f"{step:,} of {config.batch.tokens:,} tokens, {step * config.batch.tokens:,} tokens in all"
        facts["data"] = ", ".join(config.data.sources)
        facts["method"] = config.sync.get_choice_name(type(config.sync))
        facts["optimizer"] = config.optimizer.get_choice_name(type(config.optimizer))
    if (loss := last_evaluation(trained.run, step)) is not None:
        facts["held-out loss"] = f"{loss:.4f} nats a token"
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"---\nlibrary_name: transformers\n---\n\n# {config.name}\n\n| | |\n|---|---|\n{rows}\n"


def last_evaluation(run: RunDirectory, step: int) -> float | None:
    """The held-out loss at a step, if it was taken."""
    if not run.metrics.is_file():
        return None
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines() if line.endswith("}")]
    return next((line["eval_loss"] for line in reversed(lines) if line["step"] == step and line.get("eval_loss")), None)


COMMAND = Command(main=main, options=ExportOptions, positional=("run", "target"))
