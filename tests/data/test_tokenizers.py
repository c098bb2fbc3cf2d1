import json

import draccus
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from gregale.data.tokenizer_training import train_bpe
from gregale.data.tokenizers import (
    BpeConfig,
    BytesConfig,
    BytesTokenizer,
    FileConfig,
    LibraryTokenizer,
    TokenizerConfig,
    byte_level_reader,
    bytes_of_vocabulary,
    counter_of_names,
    load_tokenizer,
    save_tokenizer,
    taken_as_text,
)
from gregale.errors import UserError
from tests.data.test_text_bytes import END, metaspace, sentence_piece

TEXTS = ["the cat sat on the mat", "the dog — über alles — sat on the cat"] * 5
BPE = train_bpe(BpeConfig(vocabulary=280), iter(TEXTS))
EVERY = pytest.mark.parametrize("tokenizer", [BytesTokenizer(), BPE], ids=["bytes", "bpe"])


def test_choices_parse():
    assert draccus.decode(TokenizerConfig, {"type": "bytes"}) == BytesConfig()
    assert draccus.decode(TokenizerConfig, {"type": "bpe", "vocabulary": 300}) == BpeConfig(vocabulary=300)
    assert draccus.decode(TokenizerConfig, {"type": "file", "path": "x"}) == FileConfig(path="x")
    with pytest.raises(UserError, match=r"vocabulary is 256; it has to be from 257 to"):
        BpeConfig(vocabulary=256)


@EVERY
@given(text=st.text())
def test_decoding_gives_the_text_back_and_bytes_are_counted(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.end_of_document not in ids


@EVERY
@given(data=st.data())
def test_any_ids_decode_to_the_bytes_of_their_vocabulary_entries(tokenizer, data):
    ids = np.array(data.draw(st.lists(st.integers(0, tokenizer.vocabulary_size - 1))), np.int32)
    found = b"".join(tokenizer.vocabulary_bytes[token] for token in ids)
    assert found.decode("utf-8", "replace") == tokenizer.decode(ids)


@EVERY
def test_many_texts_at_once_are_encoded_as_each_by_itself(tokenizer):
    texts = [*TEXTS[:20], "", "ü\n\n  <|end_of_document|>€", "a" * 1000]
    for text, ids in zip(texts, tokenizer.encode_all(texts), strict=True):
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_the_end_of_a_document_is_an_id_without_bytes():
    for tokenizer in (BytesTokenizer(), BPE):
        assert tokenizer.token_bytes.shape == (tokenizer.vocabulary_size,)
        assert np.flatnonzero(tokenizer.token_bytes == 0).tolist() == [tokenizer.end_of_document]
        assert tokenizer.decode(np.array([tokenizer.end_of_document])) == ""
    assert BPE.vocabulary_size == 280
    assert len(BPE.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert BPE.fingerprint != train_bpe(BpeConfig(vocabulary=270), iter(TEXTS)).fingerprint


def test_names_of_special_tokens_are_the_tokens_in_prompts_that_ask_for_it():
    text = "a<|end_of_document|>b"
    parsing = BPE.parsing_special()
    library = tokenizers.Tokenizer.from_str(json.dumps(BPE.to_json()["library"]))
    assert parsing.encode(text).tolist() == library.encode(text).ids
    assert parsing.encode(text).tolist().count(BPE.end_of_document) == 1
    assert BPE.end_of_document not in BPE.encode(text)
    found = counter_of_names(BPE)([text, "b"])
    assert taken_as_text(found, "the prompts", "parse_special") == (
        "1 names of special tokens in the prompts are encoded as characters, most often <|end_of_document|> (1). With "
        "parse_special they are the tokens."
    )
    for texts, tokenizer in (([text], parsing), (["<|end_of_documen|>"], BPE), ([text], BytesTokenizer())):
        assert not taken_as_text(counter_of_names(tokenizer)(texts), "the prompts", "parse_special")


@EVERY
def test_saved_and_loaded_it_is_the_same(tmp_path, tokenizer):
    path = save_tokenizer(tokenizer, tmp_path / "run")
    again = load_tokenizer(tmp_path / "run")
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.vocabulary_size, again.end_of_document) == (tokenizer.vocabulary_size, tokenizer.end_of_document)
    np.testing.assert_array_equal(again.encode("the cät"), tokenizer.encode("the cät"))
    assert list(path.parent.iterdir()) == [path]


def test_a_missing_or_damaged_save_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"gone\.json: cannot be read"):
        FileConfig(path=str(tmp_path / "gone.json")).build()
    for content, message in (
        (None, "cannot be read"),
        ("{", "damaged, not JSON"),
        ("[]", "not a tokenizer that this program saved"),
        ('{"type": "library"}', "not a tokenizer that this program saved"),
        ('{"type": "library", "end_of_document": "x", "library": {}}', "not a tokenizer.json that the tokenizers"),
    ):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match=rf"tokenizer\.json: {message}"):
            load_tokenizer(tmp_path)


def test_a_tokenizer_json_of_the_sentence_piece_kind(tmp_path):
    """Spaces are marked, and unknown characters are bytes."""
    library = sentence_piece(True, pre_tokenizer=metaspace("never", split=False))
    library.add_tokens(["<think>"])
    library.save(f"{tmp_path}/t.json")
    tokenizer = FileConfig(path=f"{tmp_path}/t.json", end_of_document=END).build()
    text = "the a ü <think>b"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.vocabulary_bytes[tokenizer.vocabulary_size - 1] == b"<think>"
    assert tokenizer.end_of_document == library.token_to_id(END)
    assert tokenizer.token_bytes[[library.token_to_id("<unk>"), tokenizer.end_of_document]].tolist() == [0, 0]
    with pytest.raises(UserError, match=r"t\.json: no token `<\|endoftext\|>`.*: <unk>, </s>, <think>\."):
        FileConfig(path=str(tmp_path / "t.json")).build()


def test_a_decoder_without_bytes_per_token_is_refused():
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "end": 1}, unk_token="a"))
    library.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match=r"its decoder \(WordPiece\) does not determine"):
        LibraryTokenizer(library.to_str(), "end", "here")


def test_truncation_padding_and_a_byte_order_mark_of_a_file_are_left_out(tmp_path):
    library = tokenizers.Tokenizer.from_str(json.dumps(BPE.to_json()["library"]))
    library.enable_truncation(3)
    library.enable_padding(length=8)
    (tmp_path / "t.json").write_bytes(b"\xef\xbb\xbf" + library.to_str().encode())
    config = FileConfig(path=str(tmp_path / "t.json"), end_of_document="<|end_of_document|>")
    np.testing.assert_array_equal(config.build().encode(TEXTS[1]), BPE.encode(TEXTS[1]))


def test_the_byte_level_alphabet_is_the_librarys():
    read = byte_level_reader()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(read(character) for character in alphabet) == [bytes([value]) for value in range(256)]
    for text in ("the cat", "ü\n\t€", "\x00\x7f\xad"):
        ((token, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        assert read(token) == text.encode()


def test_ids_that_no_token_has_stand_for_nothing():
    added = [{"id": 5, "content": "<s>", "special": True}, {"id": 6, "content": "ü", "special": False}]
    tokenizer = {"decoder": {"type": "ByteLevel"}, "added_tokens": added}
    vocabulary = {"a": 0, "Ġb": 3, "<s>": 5, "ü": 6}
    assert bytes_of_vocabulary(tokenizer, vocabulary, "here") == [b"a", b"", b"", b" b", b"", b"", "ü".encode()]
