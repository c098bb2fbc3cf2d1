"""A configuration in which `model: {type: huggingface}` is what the model's folder says, as a run keeps it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gregale.data.tokenizers import BytesConfig
from gregale.errors import UserError
from gregale.huggingface.hub_model_config import shape_and_tokenizer
from gregale.model.base import HuggingFaceConfig


def completed(config: Any) -> Any:
    """The configuration with the shape in place of its place, and with its tokenizer where that is left at bytes.

    Any other is handed back. Raises `UserError` if there is no such model.
    """
    given = getattr(config, "model", None)
    if not isinstance(given, HuggingFaceConfig):
        return config
    wanted = isinstance(config.data.tokenizer, BytesConfig) and given.with_tokenizer
    try:
        model, tokenizer = shape_and_tokenizer(replace(given, with_tokenizer=wanted))
    except UserError as error:
        raise UserError(f"model.path: {error}") from None
    data = config.data if tokenizer is None else replace(config.data, tokenizer=tokenizer)
    return replace(config, model=model, data=data)
