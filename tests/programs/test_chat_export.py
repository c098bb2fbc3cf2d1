"""What `gregale export` writes of a chat template, against transformers that loads the folder."""

import json

import pytest
import transformers

from gregale.data.chat.renderer import ChatEncoder
from gregale.data.chat.template import ChatTemplate, built_in
from gregale.data.sources import ChatSource
from gregale.data.tokenizers import BytesTokenizer, LibraryTokenizer
from gregale.huggingface.tokenizer import write_tokenizer
from gregale.programs.exporting import write_chat
from tests.data.chat.families import SYSTEM, TEMPLATES, TOOL, turns, without_generation
from tests.data.chat.test_templates import library
from tests.data.test_text_bytes import END

TALK = [SYSTEM, *turns("a é", "the", "b", "c")]


def templates():
    chatml = LibraryTokenizer(library("byte-level").to_str(), END, "here")
    own = LibraryTokenizer(library("byte-level").to_str(), END, "here")
    own.chat_template = ChatTemplate("{{ messages[1].content }}", without_generation(TEMPLATES["qwen 2.5"]))
    plain = BytesTokenizer()
    for each in (chatml, plain):
        each.chat_template = built_in(each.control_tokens, each.end_name)
    return {"ChatML": (chatml, "<|im_end|>", None), "plain": (plain, plain.end_name, None), "tools": (own, "", [TOOL])}


@pytest.mark.parametrize("name", ["ChatML", "plain", "tools"])
def test_transformers_applies_the_exported_template_and_generation_ends_at_the_end_of_a_turn(name, tmp_path):
    tokenizer, end_of_turn, tools = templates()[name]
    write_tokenizer(tokenizer, tmp_path, 64)
    for _ in range(2):
        write_chat(tokenizer, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    row = {"messages": TALK, **({"tools": tools} if tools else {})}
    with ChatEncoder(tokenizer) as chat:
        ids = chat.encode(ChatSource(loss_on="all").conversation(row, "here")).ids
    assert theirs.apply_chat_template(TALK, tools, return_dict=True)["input_ids"] == ids.tolist()
    wanted = [tokenizer.end_of_document]
    if end_of_turn and end_of_turn != tokenizer.end_name:
        wanted = [tokenizer.control_tokens[end_of_turn], *wanted]
    generation = tmp_path / "generation_config.json"
    found = json.loads(generation.read_text())["eos_token_id"] if generation.exists() else wanted
    assert found == wanted


def test_an_imported_template_stays_until_the_run_has_another(tmp_path):
    tokenizer = templates()["ChatML"][0]
    write_tokenizer(tokenizer, tmp_path, 64)
    (tmp_path / "chat_template.jinja").write_text(tokenizer.chat_template.text)
    write_chat(tokenizer, tmp_path)
    assert (tmp_path / "chat_template.jinja").exists()
    tokenizer.chat_template = ChatTemplate(without_generation(TEMPLATES["zephyr"]), variables={"eos_token": END})
    write_chat(tokenizer, tmp_path)
    assert not (tmp_path / "chat_template.jinja").exists()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template.text
