"""Provides the chat template of a tokenizer: its own, a file's, or a built-in one."""

import json
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any

from gregale.data.sources.base import expand, read_bytes
from gregale.errors import UserError
from gregale.storage import StoragePath

SETTINGS, SPECIAL, TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
CHATML = ("<|im_start|>", "<|im_end|>")
# Tools are refused, because no tokenizer that needs this template has seen a call.
BUILT_IN = """\
{%- if tools %}{{ raise_exception('the built-in chat template has no tools') }}{% endif -%}
{%- for message in messages %}
    {%- if message.tool_calls %}{{ raise_exception('the built-in chat template has no tools') }}{% endif %}
    {{- 'BEGIN' + message.role + '\\n' + message.content + 'END' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'BEGINassistant\\n' }}{% endif %}
"""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, as `transformers` has it in tokenizer_config.json.

    - `text`: the Jinja source
    - `tool_use`: the source for conversations with tools; empty: `text`
    - `variables`: the special tokens by the names that templates have for them, such as `eos_token`
    """

    text: str
    tool_use: str = ""
    variables: dict[str, str] = field(default_factory=dict)


def given_template(file: str, tokenizer: StoragePath | None, end: str) -> ChatTemplate | None:
    """Return the template of a file, or else of the files beside a tokenizer; None if there is neither.

    - `file`: a Jinja file, or empty
    - `tokenizer`: the tokenizer.json; None if the tokenizer has no file
    - `end`: the name of the token that ends a document
    """
    own = own_template(tokenizer.parent) if tokenizer is not None else ChatTemplate("")
    variables = {"eos_token": end, **own.variables}
    if file:
        return ChatTemplate(text_of(expand(file, "data.chat_template")), variables=variables)
    return replace(own, variables=variables) if own.text else None


def built_in(names: Container[str], end: str) -> ChatTemplate:
    """Return the built-in template: ChatML for a tokenizer with its tokens, otherwise the names of roles as text.

    - `names`: the tokenizer's special tokens
    - `end`: the name of the token that ends a document, which ends a turn of a tokenizer without ChatML's tokens
    """
    begin, end_of_turn = ("<|im_start|>", "<|im_end|>\\n") if all(each in names for each in CHATML) else ("", end)
    return ChatTemplate(BUILT_IN.replace("BEGIN", begin).replace("END", end_of_turn), variables={"eos_token": end})


def own_template(folder: StoragePath) -> ChatTemplate:
    """Return the template and the special tokens in a tokenizer's folder; the text is empty if there is none."""
    settings = {**json_of(folder / SPECIAL), **json_of(folder / SETTINGS)}
    tokens = {name: content_of(value) for name, value in settings.items() if name.endswith("_token")}
    variables = {name: value for name, value in tokens.items() if value}
    if (folder / TEMPLATE).is_file():
        return ChatTemplate(text_of(str(folder / TEMPLATE)), variables=variables)
    found = settings.get("chat_template") or ""
    if isinstance(found, str):
        return ChatTemplate(found, variables=variables)
    try:
        named = {each["name"]: each["template"] for each in found}
        return ChatTemplate(named["default"], named.get("tool_use", ""), variables)
    except (TypeError, KeyError):
        raise UserError(
            f"{folder / SETTINGS}: its chat_template is neither a text nor a list with `default`."
        ) from None


def content_of(value: Any) -> str:
    """Return the text of a special token in tokenizer_config.json; empty for what is none."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def text_of(path: str) -> str:
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; a chat template is a text file of Jinja.") from None


def json_of(path: StoragePath) -> dict[str, Any]:
    """Return the object of a JSON file; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged, not JSON ({error}).") from None
    return found if isinstance(found, dict) else {}
