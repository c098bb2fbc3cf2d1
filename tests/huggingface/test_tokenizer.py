"""Tokenizers of a folder: the ids that transformers gives, and the tokens before a text."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from gregale.data.tokenizers import LibraryTokenizer
from gregale.huggingface.families import FAMILIES
from gregale.huggingface.tokenizer import rebuilt
from tests.data.test_text_bytes import END, LLAMA, byte_level, sentence_piece

BEGIN = "<s>"
TEXTS = ["the", " the", "   the", "a the", "", " ", "\nthe", "the  ", "x\u00e9 \U0001d518"]


def with_begin(library: Tokenizer) -> Tokenizer:
    library.add_special_tokens([BEGIN])
    number = library.token_to_id(BEGIN)
    library.post_processor = processors.TemplateProcessing(
        f"{BEGIN} $A {END}", special_tokens=[(BEGIN, number), (END, library.token_to_id(END))]
    )
    return library


def folder_of(folder: Path, library: Tokenizer, model_type: str, **settings) -> dict:
    """A folder with the files that transformers makes a tokenizer of; returns the content of tokenizer.json."""
    (folder / "tokenizer.json").write_text(library.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN, "eos_token": END, **settings}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return json.loads(library.to_str())


SETTINGS = [
    {"tokenizer_class": "LlamaTokenizer", "legacy": False},
    {"tokenizer_class": "LlamaTokenizerFast", "legacy": True},
    {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": False},
    {"tokenizer_class": "PreTrainedTokenizerFast", "legacy": False},
]


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [(name, SETTINGS[0]) for name in FAMILIES if name != "qwen2"]  # which has tokenizers of bytes alone
    + [
        (name, settings)
        for name in ("llama", "mistral", "qwen3", "olmo2", "gemma2", "gemma3_text")
        for settings in SETTINGS[1:]
    ],
)
def test_ids_are_those_of_transformers(tmp_path, model_type, settings):
    transformers = pytest.importorskip("transformers")
    library = with_begin(sentence_piece(True, normalizer=LLAMA))
    content = folder_of(tmp_path, library, model_type, **settings)
    ours = LibraryTokenizer(json.dumps(rebuilt(tmp_path, content, model_type)), END, "here")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"], text
        assert [*ours.start, *ours.encode(text).tolist(), ours.end_of_document] == theirs(text)["input_ids"]


def test_what_transformers_reads_as_it_is_stays_as_it_is(tmp_path):
    content = folder_of(tmp_path, byte_level(False), "llama", tokenizer_class="LlamaTokenizer")
    assert rebuilt(tmp_path, content, "llama") is content
    again = rebuilt(
        tmp_path, folder_of(tmp_path, sentence_piece(True), "llama", tokenizer_class="LlamaTokenizer"), "llama"
    )
    assert rebuilt(tmp_path, again, "llama") == again


def test_the_tokens_before_a_text_of_a_tokenizer_that_does_not_know_the_letter_a():
    library = Tokenizer(models.BPE(vocab={"x": 0, "y": 1}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    library.decoder = decoders.Metaspace()
    library.add_special_tokens([END])
    assert LibraryTokenizer(library.to_str(), END, "here").start == ()
    tokenizer = LibraryTokenizer(with_begin(library).to_str(), END, "here")
    assert not tokenizer.encode("a").tolist()
    assert tokenizer.start == (3,)
