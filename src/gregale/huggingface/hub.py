"""Provides the folder of a model, which is a local folder or a repository of the hub, and the shape that it has.

`model_folder("org/name@v1.0")` returns the folder of that version in the cache of `huggingface_hub` (the extra `hf`),
which downloads missing files with the user's token (`hf auth login`, or HF_TOKEN). With HF_HUB_OFFLINE=1 it uses only
the cache.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from gregale.atomic_files import DISK_ERRORS
from gregale.data.sources.base import expand
from gregale.data.tokenizers import BytesConfig, FileConfig
from gregale.errors import UserError, install_hint
from gregale.huggingface.config import read_config, text_part
from gregale.huggingface.folder import (
    ADAPTER,
    BESIDE,
    CONFIG,
    INDEX,
    TOKENIZER,
    WEIGHTS,
    check_files,
    read_json,
    weight_files,
)
from gregale.huggingface.tokenizer import end_of_document, rebuilt, rowless, tokenizer_of
from gregale.model.config import HuggingFaceConfig
from gregale.model.llama import LlamaConfig

REPOSITORY = re.compile(r"(?P<name>(?P<owner>\w[\w.-]*)/\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)


def model_folder(given: str, weights: bool = True) -> Path:
    """Return the named folder, or the snapshot of a repository: `ORG/NAME`, `ORG/NAME@REVISION`.

    - `weights`: include the tensors; else only the files beside them

    Raises `UserError` if the hub does not provide it.
    """
    path = Path(expand(given))
    repository = REPOSITORY.fullmatch(given)
    if path.exists() or repository is None:
        return path
    if Path(repository["owner"]).is_dir() and repository["revision"] is None:  # the user may mean a local path
        raise UserError(
            f"{given} is no folder, though there is a folder {repository['owner']} here. If a repository of the hub is "
            f"meant, name its branch too: {given}@main."
        )
    found = _snapshot(given, repository["name"], repository["revision"], (*BESIDE, ADAPTER))
    if not weights:
        return found
    files = weight_files(found) if (found / INDEX).is_file() else [WEIGHTS]
    return _snapshot(given, repository["name"], found.name, files)  # the same commit, also after a push


def model_name(given: str) -> str:
    """Return the name of a model, the last part of its path or repository."""
    repository = REPOSITORY.fullmatch(given)
    path = Path(expand(given))
    return repository["name"].partition("/")[2] if repository and not path.exists() else path.resolve().name


def _snapshot(given: str, name: str, revision: str | None, files: tuple[str, ...] | list[str]) -> Path:
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports] -- an optional extra
        from huggingface_hub import errors  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            f"{given} is no folder. As the name of a repository of the Hugging Face hub it needs the extra `hf`. "
            + install_hint("hf")
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except errors.HFValidationError:
        problem = f"{name} cannot be the name of a repository of the hub either"
    except errors.GatedRepoError:
        problem = (
            f"the hub requires that you accept the conditions of {name}: accept them on its page, and log in with "
            "`hf auth login`, or set a token in HF_TOKEN"
        )
    except errors.RepositoryNotFoundError:
        problem = f"the hub has no repository {name} that your token may read (`hf auth login`, or HF_TOKEN)"
    except errors.RevisionNotFoundError:
        problem = f"{name} has no branch, tag or commit {revision}"
    except errors.LocalEntryNotFoundError as error:
        offline = isinstance(error.__cause__, errors.OfflineModeIsEnabled)
        why = "HF_HUB_OFFLINE says not to ask the hub" if offline else _hub_error(error.__cause__ or error)
        problem = (
            f"{why}; the cache does not have it. `hf download {name} --local-dir FOLDER`, where there is a network, "
            "makes a folder of it"
        )
    except (OSError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage] -- the client's own
        if getattr(error, "errno", None) in DISK_ERRORS:
            raise
        problem = _hub_error(error)
    raise UserError(f"{given} is no folder here, and {problem}.")


def _hub_error(error: BaseException) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"the hub did not give it ({type(error).__name__}: {first})"


def shape_and_tokenizer(given: HuggingFaceConfig) -> tuple[LlamaConfig, FileConfig | None]:
    """Return the configuration of `model: {type: huggingface}`, and its tokenizer if requested, without the weights.

    Raises `UserError` if there is no such model, or if Gregale does not support it.
    """
    imported = Path(given.path) / "huggingface"
    if (imported / CONFIG).is_file() and not (Path(given.path) / CONFIG).is_file():
        raise UserError(
            f"{given.path} is a model of `gregale import`. To go on with its weights, give start_from {given.path} in "
            f"place of `model`; for its shape with random weights, give {imported} as the path."
        )
    folder = model_folder(given.path, weights=False)
    check_files(folder, BESIDE)
    saved = text_part(read_json(folder / CONFIG))
    _, model = read_config(saved, str(folder / CONFIG))
    if not given.with_tokenizer:
        return model, None
    end = end_of_document(folder, saved, "model.with_tokenizer: false, and data.tokenizer with `end_of_document: NAME`")
    if model.vocabulary is not None and (without_rows := rowless(folder, model.vocabulary)):
        raise UserError(
            f"{given.path} has tokens without a row in the model's tables: {', '.join(without_rows)}. `gregale import "
            f"{given.path} NAME` leaves them out; give NAME/huggingface as the path."
        )
    content = tokenizer_of(folder)
    if rebuilt(folder, content, str(saved["model_type"])) != content:
        raise UserError(
            f"{given.path} has a LlamaTokenizer, which transformers builds anew, so that spaces at the beginning of a "
            f"text have other ids than by its {TOKENIZER}. `gregale import {given.path} NAME` writes a {TOKENIZER} "
            "with the ids of transformers; give NAME/huggingface as the path."
        )
    return model, FileConfig(str(folder.absolute() / TOKENIZER), end)


def resolved(config: Any) -> Any:
    """Return the configuration with the model's shape instead of its path, and its tokenizer if the config uses bytes.

    Returns other configurations unchanged. Raises `UserError` if there is no such model.
    """
    given = config.model
    if not given.is_at_hub:
        return config
    wanted = config.data.tokenizer == BytesConfig() and given.with_tokenizer
    try:
        model, tokenizer = shape_and_tokenizer(replace(given, with_tokenizer=wanted))
    except UserError as error:
        raise UserError(f"model.path: {error}") from None
    data = config.data if tokenizer is None else replace(config.data, tokenizer=tokenizer)
    return replace(config, model=model, data=data)
