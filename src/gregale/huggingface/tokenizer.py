"""Provides tokenizers of hub folders."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gregale.data.chat.template import SETTINGS, TEMPLATE, given_template
from gregale.data.tokenizers import SPACE_MARK, Tokenizer, byte_level_reader, decoder_kinds, pre_tokenizers_of
from gregale.errors import UserError
from gregale.huggingface.folder import GENERATION, TOKENIZER, read_json, write_json

REBUILT_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
REBUILT_IN = ("llama", "qwen3", "qwen2_moe", "qwen3_moe", "olmoe", "gemma", "gemma2", "gemma3_text", "dots1", "gpt_oss")
REBUILT_IN += ("seed_oss", "cwm", "exaone4", "hy_v3", "solar_open")  # not in the other families
END_OF_DOCUMENT = "<|end_of_document|>"  # its name in the byte tokenizer


def end_of_document(folder: Path, saved: Mapping[str, Any], otherwise: str) -> str:
    """Return the name of the token that ends a text: the first `eos_token_id` of generation_config.json or config.json.

    - `otherwise`: the user's option for another token, for messages

    Raises `UserError` if there is no tokenizer.json, or if it lacks this token.
    """
    if not (folder / TOKENIZER).is_file():
        raise UserError(
            f"{folder} has no {TOKENIZER}. Its tokenizer has to be a fast one: "
            "`AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` of transformers writes it."
        )
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    ids = generation.get("eos_token_id")
    ids = saved.get("eos_token_id") if ids is None else ids
    first = ids[0] if isinstance(ids, list) and ids else ids
    names = {token["id"]: token["content"] for token in _added(folder)}
    if type(first) is not int or first not in names:
        raise UserError(
            f"{folder}: its eos_token_id is {ids}, which is none of the tokens added in {TOKENIZER}. Give the name of "
            f"the token that ends a text, {otherwise}: {', '.join(list(names.values())[:20]) or 'none'}."
        )
    return names[first]


def rowless(folder: Path, rows: int) -> list[str]:
    """Return the special tokens without a row in a model's tables (of Gemma 3 without images, the image token)."""
    return [token["content"] for token in _added(folder) if token["special"] and token["id"] >= rows]


def tokenizer_of(folder: Path, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return a folder's tokenizer.json without the added tokens `names`."""
    content = read_json(folder / TOKENIZER)
    kept = [token for token in content.get("added_tokens") or [] if token["content"] not in names]
    return {**content, "added_tokens": kept} if names else content


def rebuilt(folder: Path, content: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return a tokenizer.json as transformers 5 reads it: a LlamaTokenizer keeps only vocabulary, merges and tokens.

    The treatment of spaces is then from tokenizer_config.json (`add_prefix_space`, `legacy`), and not from
    tokenizer.json, which may have other ids for spaces at the beginning of a text.

    - `content`: content of tokenizer.json
    - `model_type`: value in config.json; for some types transformers reads tokenizer.json unchanged
    """
    path = folder / SETTINGS
    settings = read_json(path) if path.is_file() else {}
    model = content.get("model") or {}
    of_class = settings.get("tokenizer_class") in REBUILT_CLASSES and model_type in REBUILT_IN
    kinds = decoder_kinds(content.get("decoder")) | {
        step["type"] for step in pre_tokenizers_of(content.get("pre_tokenizer"))
    }
    if not of_class or model.get("type") != "BPE" or "ByteLevel" in kinds:
        return content
    prefix = settings.get("add_prefix_space") is not False
    scheme = "never" if not prefix else "always" if settings.get("legacy") else "first"
    spaces = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    replaced = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    return {
        **content,
        "model": {**model, "dropout": None, "unk_token": None, "fuse_unk": True, "byte_fallback": True},
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE_MARK, "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": [replaced, {"type": "ByteFallback"}, {"type": "Fuse"}, *spaces]},
    }


def _added(folder: Path) -> list[dict[str, Any]]:
    found = read_json(folder / TOKENIZER).get("added_tokens") or []
    kinds = {"id": int, "content": str, "special": bool}
    for token in found if isinstance(found, list) else [found]:
        if not (isinstance(token, dict) and all(isinstance(token.get(key), kind) for key, kind in kinds.items())):
            raise UserError(f"{folder / TOKENIZER} is damaged: {token!r} is no added token.")
    return found


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write the files from which transformers loads a fast tokenizer. `context`: maximum tokens of a text."""
    saved = tokenizer.to_json()
    content = saved["library"] if saved["type"] == "library" else _bytes()
    (folder / TOKENIZER).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": saved.get("end_of_document", END_OF_DOCUMENT),
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / SETTINGS, settings)


def write_template(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the chat template where transformers finds it, unless the folder has this one."""
    template, settings = tokenizer.chat_template, read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    own = given_template("", folder / TOKENIZER, tokenizer.end_name)
    if template is None or (own is not None and (own.text, own.tool_use) == (template.text, template.tool_use)):
        return
    named = [("default", template.text), ("tool_use", template.tool_use)]
    listed = [{"name": name, "template": text} for name, text in named]
    (folder / TEMPLATE).unlink(missing_ok=True)  # transformers would prefer it
    write_json(folder / SETTINGS, {**settings, "chat_template": listed if template.tool_use else template.text})


def _bytes() -> dict[str, Any]:
    """Return the byte tokenizer in the library's format: byte pairs without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    read = byte_level_reader()
    vocabulary = {character: read(character)[0] for character in pre_tokenizers.ByteLevel.alphabet()}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    return json.loads(library.to_str())
