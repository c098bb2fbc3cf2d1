"""Provides the model configuration of `model: {type: huggingface, path: ...}` from a model's folder."""

from __future__ import annotations

from gregale.data.tokenizers import FileConfig
from gregale.errors import UserError
from gregale.huggingface.config import read_config
from gregale.huggingface.folder import BESIDE, CONFIG, TOKENIZER, check_files, read_json
from gregale.huggingface.hub import model_folder
from gregale.huggingface.tokenizer import end_of_document, rebuilt, rowless, tokenizer_of
from gregale.model.base import HuggingFaceConfig
from gregale.model.config import LlamaConfig


def shape_and_tokenizer(given: HuggingFaceConfig) -> tuple[LlamaConfig, FileConfig | None]:
    """Return the model's shape, and its tokenizer if `given` requests it, without a look at the weights.

    Raises `UserError` if there is no such model, or if Gregale does not support it.
    """
    folder = model_folder(given.path, weights=False)
    check_files(folder, BESIDE)
    saved = read_json(folder / CONFIG)
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
