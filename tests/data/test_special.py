"""Names of special tokens in the text of sources: one token each, or characters and a note."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken

from gregale.data.preparation import prepare
from gregale.data.sources.chat import ChatSource
from gregale.data.tokenizer_training import train_bpe
from gregale.data.tokenizers import BpeConfig, LibraryTokenizer, counter_of_names, from_json
from gregale.errors import UserError
from gregale.programs.runtime.evaluation import SlidingWindows
from tests.data.test_text_bytes import END, LIBRARIES, config_of

CHAT = "<|im_start|>user\nthe café<|im_end|>\n<|im_start|>assistant\nthe<|im_end|>"
NAMES = ["<|im_start|>", "<|im_end|>"]


def with_special(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    copied = tokenizers.Tokenizer.from_str(library.to_str())
    copied.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    return copied


@pytest.fixture(params=["byte-level", "llama"])
def library(request):
    return with_special(LIBRARIES[request.param][0])


@pytest.fixture
def config(tmp_path, library):
    return config_of(tmp_path, [CHAT] * 300, library)


def count(stream, token: int) -> int:
    return int((stream.read(0, len(stream))[0] == token).sum())


def test_with_parse_special_every_name_is_its_token_in_all_text(config, library):
    parsing = dataclasses.replace(config, tokenizer=dataclasses.replace(config.tokenizer, parse_special=True))
    corpus = prepare(parsing, 16, 0)
    token = library.token_to_id("<|im_start|>")
    train, held_out = count(corpus.train_streams["x"], token), count(corpus.held_out_streams["x"], token)
    assert min(train, held_out) > 0
    assert train + held_out == 600
    assert count(corpus.validation_streams["y"], token) == 600
    assert not corpus.notes
    windows = SlidingWindows([corpus.validation_streams["y"]], 16, 16, (0,), corpus.tokenizer.end_of_document)
    text = CHAT
    for name in NAMES:
        text = text.replace(name, "")
    assert set(windows.text_bytes(corpus.tokenizer.token_bytes).tolist()) == {len(text.encode())}


def test_without_it_a_build_notes_the_number_of_names_once(config, library):
    corpus = prepare(config, 16, 0)
    assert count(corpus.validation_streams["y"], library.token_to_id("<|im_start|>")) == 0
    assert corpus.notes == (  # the validation source is the same text, so it has the same store
        "data.sources.x: 1,200 names of special tokens in the text are encoded as characters, most often <|im_start|> "
        "(600), <|im_end|> (600). With data.tokenizer.parse_special (type file) they are the tokens.",
    )
    assert prepare(config, 16, 0).notes == ()


def test_the_choice_is_part_of_the_stores_identity_and_the_default_is_that_of_earlier_versions(config, library):
    plain, parsing = (dataclasses.replace(config.tokenizer, parse_special=parses).build() for parses in (False, True))
    assert plain.to_json() == {"type": "library", "end_of_document": END, "library": json.loads(library.to_str())}
    assert plain.fingerprint != parsing.fingerprint == plain.parsing_special().fingerprint
    again = from_json(json.loads(json.dumps(parsing.to_json())), "here")
    assert again.parses_special
    assert again.encode(CHAT).tolist() == parsing.encode(CHAT).tolist() != plain.encode(CHAT).tolist()


def test_names_are_counted_where_they_stand_and_the_token_of_unknown_characters_keeps_its_bytes():
    library = tokenizers.Tokenizer.from_str(LIBRARIES["byte-level"][0].to_str())
    library.add_special_tokens(["<s>", "<|a|>", "<|a|>b", "[X]"])
    counted = counter_of_names(LibraryTokenizer(library.to_str(), END, "here"))
    assert counted(["<s><s>", "<|a|>b <|a|>", "[X", "]<|a", "|>"]) == {"<s>": 2, "<|a|>b": 1, "<|a|>": 1}
    bpe = train_bpe(BpeConfig(vocabulary=260), iter(["abc"] * 9))
    assert not counter_of_names(bpe.parsing_special())([END, "<|end_of_document|>"])
    unknown = LibraryTokenizer(LIBRARIES["unknown"][0].to_str(), END, "here", parses_special=True)
    ((ids, more),) = unknown.encode_counted(["ab → cd"])
    assert ids.tolist().count(json.loads(LIBRARIES["unknown"][0].to_str())["model"]["vocab"]["<unk>"]) > 0
    assert (unknown.token_bytes[ids] + more).sum() == len("ab → cd".encode())
    np.testing.assert_array_equal(ids, unknown.encode("ab → cd"))


def test_damaged_files_beside_a_tokenizer_stop_conversations_alone(config, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert prepare(config, 8, 0).tokenizer.chat_template is None
    talks = ChatSource(files=(f"{tmp_path}/text.jsonl",))
    with pytest.raises(UserError, match=r"tokenizer_config\.json is damaged"):
        prepare(dataclasses.replace(config, sources={"x": talks}, validation={}), 8, 0)
