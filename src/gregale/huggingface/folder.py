"""Provides a model's folder in the hub's format: its configuration, its tensor files, and the files beside them."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gregale.atomic_files import LockHeld, atomic_replace, is_at, locked
from gregale.errors import UserError
from gregale.huggingface.config import read_config, text_part
from gregale.huggingface.families import LAYER, Family, Slot, check_names
from gregale.huggingface.safetensors import Tensor, read_header, unpacked
from gregale.model.llama import LlamaConfig
from gregale.storage import ObjectPath, StoragePath, write_bytes

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
ADAPTER = "adapter_config.json"
# How names of tensors begin in a model of several parts, and in the text part alone.
OF_TEXT = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Files beside the weights, which training does not change.
BESIDE = (
    *(CONFIG, GENERATION, INDEX, TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt"),
)


@dataclass(frozen=True)
class Folder:
    """A folder with the parsed headers of its tensor files."""

    path: Path
    saved: Mapping[str, Any]  # content of its config.json, of a model of several parts that of its text
    family: Family
    model: LlamaConfig
    tensors: Mapping[str, Tensor]  # tensors of all its files, by name
    left_out: tuple[str, ...] | None = None  # names of tensors of other parts; None: the files have no other part

    @property
    def files(self) -> list[Path]:
        return sorted({tensor.path for tensor in self.tensors.values()})

    def check(self, slots: list[Slot]) -> None:
        """Raise `UserError` if names or shapes of the tensors differ from those of the model."""
        check_names(set(self.tensors), slots, str(self.path))
        for slot in slots:
            for name in slot.tensors():
                if (found := self.tensors[name]).shape != slot.shape:
                    raise UserError(
                        f"{found.path}: {name} has the shape {list(found.shape)}, and by {CONFIG} it has "
                        f"{list(slot.shape)}."
                    )


def open_folder(path: Path) -> Folder:
    """Return the model in a folder; raise `UserError` if there is none, or if it is damaged or of another format."""
    if path.is_file():
        raise UserError(f"{path} is a file; a model is a folder with {CONFIG}, {TOKENIZER} and {WEIGHTS}.")
    if not path.is_dir():
        raise UserError(f"{path} is not a folder, and no name of a model on the hub, which is ORG/NAME.")
    check_files(path, (*BESIDE, WEIGHTS))
    if not (path / CONFIG).is_file() or not any((path / name).is_file() for name in (WEIGHTS, INDEX)):
        _reject_other_formats(path)
    whole = read_json(path / CONFIG)
    saved = text_part(whole)
    family, model = read_config(saved, str(path / CONFIG))
    return Folder(path, saved, family, model, *_own_tensors(tensors_of(path), family, model.layers, saved is not whole))


def _own_tensors(
    found: dict[str, Tensor], family: Family, layers: int, is_part: bool
) -> tuple[dict[str, Tensor], tuple[str, ...] | None]:
    """Return the tensors of a model by the names of its family, and `Folder.left_out`.

    - `is_part`: the model is the text part of one of several parts
    """
    own, others = {}, []
    for name, tensor in found.items():
        start = next((start for start in OF_TEXT if name.startswith(start)), "") if is_part else ""
        named = OF_TEXT.get(start, "") + name.removeprefix(start)
        number = named.removeprefix(LAYER.partition("{")[0]).partition(".")[0]
        is_more = family.more_layers and number.isdecimal() and int(number) >= layers
        if is_more or (is_part and not start and not named.startswith("lm_head.")):
            others.append(name)
        else:
            own[named] = tensor
    return own, tuple(others) if is_part or others else None


def check_files(folder: StoragePath, names: Iterable[str]) -> None:
    """Raise `UserError` for paths that are no files, or links that leave the folder; a pipe's read could wait forever.

    In the hub's cache, a file of a snapshot may be a link to one of the repository's blobs.
    """
    if isinstance(folder, ObjectPath):
        return
    inside = folder.resolve()
    blobs = inside.parent.parent / "blobs" if inside.parent.name == "snapshots" else None
    for path in (folder / name for name in names if os.path.lexists(folder / name)):
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(inside) and target.parent != blobs:
            raise UserError(
                f"{path} is a link out of {folder}, to {target}. Gregale reads and copies no file outside of a "
                "model's folder. If the file belongs to the model, copy it to the place of the link."
            )
        if target.exists() and not target.is_file():
            raise UserError(f"{path} is a folder, a pipe or a device. Gregale reads only files of a model.")


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder's files, by name; raise `UserError` if a file is missing or damaged."""
    if (path / INDEX).is_file():
        names = weight_files(path)
        check_files(path, names)
        if missing := [name for name in names if not (path / name).is_file()]:
            raise UserError(f"{path} lacks {', '.join(missing)}, which {INDEX} names: a download that was cut off?")
        found: dict[str, Tensor] = {}
        for file in names:
            for name, tensor in read_header(path / file).items():
                if (other := found.setdefault(name, tensor)) is not tensor:
                    raise UserError(f"{path} has {name} twice, in {other.path.name} and in {file}.")
        return unpacked(found)
    if (path / WEIGHTS).is_file():
        return unpacked(read_header(path / WEIGHTS))
    raise UserError(f"{path} has no {WEIGHTS} and no {INDEX}.")


def _reject_other_formats(path: Path) -> None:
    """Raise `UserError` with advice for adapters, pickles and other formats than safetensors."""
    if (path / ADAPTER).is_file():
        raise UserError(
            f"{path} is an adapter, by its {ADAPTER}: changes to another model. A run that starts from that model may "
            "continue it (`adapter.start_from`). Or join them where you have both: "
            "`AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(OTHER)` of peft, and "
            "the tokenizer beside it."
        )
    if pickled := _first(path, PICKLES):
        raise UserError(
            f"{path} has its weights in {pickled}, a pickle: to read one is to run whatever code it holds, so "
            "Gregale reads none. Take the safetensors of this model, or make them where you trust the file: "
            "`AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)` of transformers."
        )
    if packed := _first(path, ("*.gguf",)):
        raise UserError(
            f"{path} has its weights in {packed}, which is another format, most often quantised. Take the "
            "safetensors of the model that it was made of."
        )


def _first(path: Path, patterns: tuple[str, ...]) -> str | None:
    return min((found.name for pattern in patterns for found in path.glob(pattern)), default=None)


def weight_files(path: Path) -> list[str]:
    weight_map = read_json(path / INDEX).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path / INDEX} is damaged: it has no weight_map from tensors to files beside it.")
    if outside := next((name for name in names if name != os.path.basename(name) or name in ("", ".", "..")), None):
        raise UserError(
            f"{path / INDEX} names the file {outside!r}, which does not lie beside it: a model's files lie in its "
            "folder, and Gregale reads no other one. Put the file there, and its plain name into the index."
        )
    return sorted(set(names))


def read_json(path: StoragePath) -> dict[str, Any]:
    """Return the JSON object of a file; raise `UserError` if the file is missing or damaged."""
    try:
        found = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged, not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object.")
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON in the format of transformers, so that an unchanged file keeps its bytes."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_beside(source: StoragePath, target: StoragePath, names: Iterable[str] = BESIDE) -> None:
    """Copy the files beside a model's weights that exist."""
    for name in names:
        if (source / name).is_file():
            write_bytes(target / name, (source / name).read_bytes())


@contextmanager
def made_whole(path: Path, size: int) -> Iterator[Path]:
    """Yield a temporary folder; rename it at the end, or remove it after an error.

    `size`: bytes of its files Raises `UserError` if the name exists, if another process makes the folder, or if the
    disk lacks space.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists already, and would be overwritten. Give another name, or remove it.")
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.absolute()):
        free = shutil.disk_usage(path.absolute().parent).free
        if free < size:
            raise UserError(
                f"{path} needs {size:,} bytes, and its disk has {free:,} free. Make room, or name another disk."
            )
        with atomic_replace(path.absolute()) as partial:
            partial.mkdir()
            yield partial


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock, a file, while this process makes a folder; there is none on a file system without locks."""
    lock = path.with_name(f".{path.name}.lock")
    with ExitStack() as stack:
        try:
            file = stack.enter_context(locked(lock))
        except LockHeld as taken:
            raise UserError(f"{path} is being made by another process ({taken}).") from None
        try:
            yield
        finally:
            if file is not None and is_at(file, lock):
                lock.unlink()
