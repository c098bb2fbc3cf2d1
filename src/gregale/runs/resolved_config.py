"""Resolution of `model: {type: huggingface}` to the shape in the model's folder, as a run stores it."""

from dataclasses import replace
from typing import Any

from gregale.data.tokenizers import BytesConfig
from gregale.errors import UserError
from gregale.huggingface.hub import shape_and_tokenizer
from gregale.model.base import HuggingFaceConfig


def resolved(config: Any) -> Any:
    """Return the configuration with the model's shape instead of its path, and its tokenizer if the config uses bytes.

    Returns other configurations unchanged. Raises `UserError` if there is no such model.
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
